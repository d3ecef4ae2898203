// Creates one charge, however often it has to ask: go run charge.go AMOUNT KEY
//
// What it reads from the environment and what its exit codes mean is in docs/clients.md. Nothing but the standard library.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"
)

func setting(name, otherwise string) string {
	if value, ok := os.LookupEnv(name); ok {
		return value
	}
	return otherwise
}

var (
	url      = setting("URL", "http://127.0.0.1:8080/v1/charges")
	tries, _ = strconv.Atoi(setting("TRIES", "6"))
	pause, _ = strconv.ParseFloat(setting("PAUSE", "1"), 64)
	client   = &http.Client{Timeout: 60 * time.Second}
)

type answer struct {
	status int
	body   string
	final  bool
	// Seconds that the answer asks to wait; negative: choose.
	wait float64
}

// Whether an answer is the last word.
func final(response *http.Response, body []byte) bool {
	// The proxy's own answers say what is safe: the same request under the same key, or not.
	if response.Header.Get("Content-Type") == "application/problem+json" {
		var problem struct{ Retry string }
		return json.Unmarshal(body, &problem) == nil && problem.Retry != "same-key"
	}
	// A stored answer comes back the same however often it is asked for.
	if response.Header.Get("Idempotent-Replayed") != "" {
		return true
	}
	switch response.StatusCode {
	case 408, 409, 425, 429:
		return false
	}
	return response.StatusCode < 500
}

// One try; an error where there is no whole answer.
func ask(amount, key string) (answer, error) {
	form := strings.NewReader("amount=" + amount + "&currency=eur&source=tok_visa")
	request, err := http.NewRequest("POST", url, form)
	if err != nil {
		return answer{}, err
	}
	request.Header.Set("Authorization", "Bearer sk_test_example")
	request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	request.Header.Set("Idempotency-Key", key)
	response, err := client.Do(request)
	if err != nil {
		return answer{}, err
	}
	defer response.Body.Close()
	// io.ErrUnexpectedEOF where the body breaks off: then nobody has an answer yet.
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return answer{}, err
	}
	wait, err := strconv.ParseFloat(response.Header.Get("Retry-After"), 64)
	if err != nil {
		wait = -1
	}
	return answer{response.StatusCode, string(body), final(response, body), wait}, nil
}

// The last answer. Keep the key with the order: whoever calls this again needs the same one.
func charge(amount, key string) answer {
	last := answer{body: "no answer"}
	for n := 0; n < tries; n++ {
		wait := -1.0
		if got, err := ask(amount, key); err != nil {
			fmt.Fprintf(os.Stderr, "try %d: %v\n", n+1, err)
		} else if last, wait = got, got.wait; got.final {
			return got
		}
		if wait < 0 {
			// Twice as long each time, and never all clients at once.
			wait = pause * float64(int(1)<<n) * (0.5 + rand.Float64()/2)
		}
		if n+1 < tries {
			time.Sleep(time.Duration(wait * float64(time.Second)))
		}
	}
	return last
}

func main() {
	rand.Seed(time.Now().UnixNano())
	got := charge(os.Args[1], os.Args[2])
	if got.final && got.status < 300 {
		fmt.Println(got.body)
		return
	}
	fmt.Fprintln(os.Stderr, got.body)
	if got.final {
		os.Exit(1)
	}
	os.Exit(2)
}
