import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.time.Duration;
import java.util.Set;
import java.util.concurrent.ThreadLocalRandom;

/**
 * Creates one charge, however often it has to ask: java Charge.java AMOUNT KEY
 *
 * What it reads from the environment and what its exit codes mean is in docs/clients.md. Nothing but the JDK (17 or later).
 */
public final class Charge {
  private static final URI URL = URI.create(setting("URL", "http://127.0.0.1:8080/v1/charges"));
  private static final int TRIES = Integer.parseInt(setting("TRIES", "6"));
  private static final double PAUSE = Double.parseDouble(setting("PAUSE", "1"));
  private static final HttpClient CLIENT = HttpClient.newBuilder().connectTimeout(Duration.ofSeconds(5)).build();

  private static String setting(String name, String otherwise) {
    return System.getenv().getOrDefault(name, otherwise);
  }

  /** Whether an answer is the last word. */
  private static boolean isFinal(HttpResponse<String> answer) {
    // The proxy's own answers say what is safe: the same request under the same key, or not. (With a JSON library at
    // hand, read the member `retry`.)
    if (answer.headers().firstValue("Content-Type").orElse("").equals("application/problem+json"))
      return !answer.body().contains("\"retry\":\"same-key\"");
    // A stored answer comes back the same however often it is asked for.
    if (answer.headers().firstValue("Idempotent-Replayed").isPresent()) return true;
    return answer.statusCode() < 500 && !Set.of(408, 409, 425, 429).contains(answer.statusCode());
  }

  /** Seconds until the next try. */
  private static double pauseAfter(HttpResponse<String> answer, int n) {
    String after = answer == null ? "" : answer.headers().firstValue("Retry-After").orElse("");
    if (after.matches("\\d+")) return Integer.parseInt(after);
    // Twice as long each time, and never all clients at once.
    return PAUSE * (1 << n) * ThreadLocalRandom.current().nextDouble(0.5, 1);
  }

  /** The last answer, or null where there was none. Keep the key with the order: whoever calls this again needs the same one. */
  private static HttpResponse<String> charge(String amount, String key) throws InterruptedException {
    HttpRequest request = HttpRequest.newBuilder(URL)
        .timeout(Duration.ofSeconds(60))
        .header("Authorization", "Bearer sk_test_example")
        .header("Content-Type", "application/x-www-form-urlencoded")
        .header("Idempotency-Key", key)
        .POST(BodyPublishers.ofString("amount=" + amount + "&currency=eur&source=tok_visa"))
        .build();
    HttpResponse<String> last = null;
    for (int n = 0; n < TRIES; n++) {
      HttpResponse<String> answer = null;
      try {
        // Throws where the body breaks off, too: then nobody has an answer yet.
        answer = CLIENT.send(request, BodyHandlers.ofString());
        last = answer;
        if (isFinal(answer)) return answer;
      } catch (IOException error) {
        System.err.println("try " + (n + 1) + ": " + error);
      }
      if (n + 1 < TRIES) Thread.sleep(Math.round(1000 * pauseAfter(answer, n)));
    }
    return last;
  }

  public static void main(String[] arguments) throws InterruptedException {
    HttpResponse<String> answer = charge(arguments[0], arguments[1]);
    boolean settled = answer != null && isFinal(answer);
    boolean charged = settled && answer.statusCode() < 300;
    (charged ? System.out : System.err).println(answer == null ? "no answer" : answer.body());
    System.exit(charged ? 0 : settled ? 1 : 2);
  }
}
