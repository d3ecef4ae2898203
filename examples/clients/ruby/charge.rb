# Creates one charge, however often it has to ask: ruby charge.rb AMOUNT KEY
#
# What it reads from the environment and what its exit codes mean is in docs/clients.md. Nothing but the standard library.
require 'json'
require 'net/http'

TARGET = URI(ENV.fetch('URL', 'http://127.0.0.1:8080/v1/charges'))
TRIES = Integer(ENV.fetch('TRIES', '6'))
PAUSE = Float(ENV.fetch('PAUSE', '1'))

Answer = Struct.new(:status, :body, :final, :wait)

# Whether an answer is the last word.
def final?(response)
  # The proxy's own answers say what is safe: the same request under the same key, or not.
  return JSON.parse(response.body)['retry'] != 'same-key' if response['Content-Type'] == 'application/problem+json'
  # A stored answer comes back the same however often it is asked for.
  return true if response['Idempotent-Replayed']

  status = response.code.to_i
  status < 500 && ![408, 409, 425, 429].include?(status)
end

# One try; raises where there is no whole answer.
def ask(amount, key)
  http = Net::HTTP.new(TARGET.host, TARGET.port)
  http.use_ssl = TARGET.scheme == 'https'
  http.open_timeout = 5
  http.read_timeout = 60
  response = http.post(TARGET.request_uri, "amount=#{amount}&currency=eur&source=tok_visa",
                       'Authorization' => 'Bearer sk_test_example',
                       'Content-Type' => 'application/x-www-form-urlencoded',
                       'Accept-Encoding' => 'identity',
                       'Idempotency-Key' => key)
  # net/http takes a head or a body that breaks off for a whole one (the body: unless `ignore_eof` is false, Ruby 3.2).
  length = response['Content-Length']
  whole = length ? response.body.bytesize == length.to_i : response['Transfer-Encoding']
  raise EOFError, 'the answer broke off' unless whole

  Answer.new(response.code.to_i, response.body, final?(response), response['Retry-After']&.to_i)
end

# The last answer. Keep the key with the order: whoever calls this again needs the same one.
def charge(amount, key)
  last = Answer.new(0, 'no answer', false, nil)
  TRIES.times do |n|
    wait = nil
    begin
      last = ask(amount, key)
      return last if last.final

      wait = last.wait
    rescue IOError, SystemCallError, Timeout::Error, Net::ProtocolError, Net::HTTPBadResponse => e
      warn "try #{n + 1}: #{e.class}: #{e.message}"
    end
    # Twice as long each time, and never all clients at once.
    sleep(wait || PAUSE * 2**n * rand(0.5..1.0)) if n + 1 < TRIES
  end
  last
end

answer = charge(ARGV[0], ARGV[1])
charged = answer.final && answer.status < 300
(charged ? $stdout : $stderr).puts(answer.body)
exit(charged ? 0 : answer.final ? 1 : 2)
