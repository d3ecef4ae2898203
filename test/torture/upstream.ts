import { once } from 'node:events'
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import type { History } from './history.ts'
import type { Random } from './random.ts'

/** What the upstream does with a complete request. */
const ACTS = [
  'answer',
  'answer late',
  'answer slowly',
  'answer 500',
  'refuse',
  'break off before',
  'break off after',
  'break off within',
  'say that nothing was done',
] as const
type Act = (typeof ACTS)[number]
const WEIGHTS: Readonly<Record<Act, number>> = {
  answer: 60,
  'answer late': 12,
  'answer slowly': 6,
  'answer 500': 3,
  refuse: 6,
  'break off before': 3,
  'break off after': 4,
  'break off within': 3,
  'say that nothing was done': 3,
}
const TOTAL = Object.values(WEIGHTS).reduce((sum, weight) => sum + weight, 0)

/**
 * An upstream that charges without checking for duplicates, answers status queries truthfully, and drops connections as upstreams do.
 * The charge is made the moment its request is complete.
 */
export async function upstream(
  history: History,
  random: Random,
  calm: () => boolean,
): Promise<AsyncDisposable & { readonly port: number }> {
  const server = createServer({ keepAliveTimeout: 60_000 }, (request, response) => {
    let body = ''
    request.on('error', () => {})
    request.setEncoding('latin1').on('data', (chunk: string) => (body += chunk))
    request.on('end', () => {
      if (request.method === 'GET') tell(history, request.url ?? '', response)
      else charge(history, random, calm(), request, body, response)
    })
  }).listen(0, '127.0.0.1')
  await once(server, 'listening')
  return {
    port: (server.address() as AddressInfo).port,
    async [Symbol.asyncDispose]() {
      server.closeAllConnections()
      await new Promise((resolve) => server.close(resolve))
    },
  }
}

function tell(history: History, target: string, response: ServerResponse): void {
  const record = new URL(target, 'http://upstream').searchParams.get('record') ?? ''
  const operation = history.byRecord.get(record)
  const [execution] = operation?.executions ?? []
  if (operation !== undefined)
    history.note(operation, `upstream asked: ${execution === undefined ? 'nothing' : 'done'}`)
  const found = execution !== undefined
  response.writeHead(found ? 200 : 404, { 'Content-Type': 'application/json' })
  response.end(
    found ? `{"record":"${record}","status":"${execution.status}","answer":${execution.body}}` : '{}',
  )
}

function charge(
  history: History,
  random: Random,
  calm: boolean,
  { headers }: IncomingMessage,
  asked: string,
  response: ServerResponse,
): void {
  const name = `${headers.authorization} ${headers['idempotency-key'] as string}`
  const operation = history.operations.get(name)
  if (operation === undefined) {
    history.strays.push(name)
    response.writeHead(500).end()
    return
  }
  history.byRecord.set(headers['idempotency-record'] as string, operation)
  const act = calm ? 'answer' : actOf(random)
  history.note(operation, `upstream, fence ${headers['idempotency-fence'] as string}: ${act}`)
  if (act === 'refuse') {
    response.writeHead(503, { 'Retry-After': '0' }).end('try later')
    return
  }
  if (act === 'say that nothing was done') {
    response.writeHead(422, { 'Idempotency-Outcome': 'not-applied' }).end('nothing was done')
    return
  }
  if (act === 'break off before') {
    response.socket?.destroy()
    return
  }
  const number = operation.executions.length + 1
  const pad = 'x'.repeat(random.chance(0.02) ? random.between(2000, 60_000) : random.between(0, 600))
  const body = `{"operation":"${name}","execution":${number},"request":${JSON.stringify(asked)},"pad":"${pad}"}`
  const status = act === 'answer 500' ? 500 : 201
  operation.executions.push({ status, body, payload: asked })
  history.hasDoubles ||= operation.executions.length > 1
  const answer = (): void => {
    response.writeHead(status, { 'Content-Type': 'application/json', 'Content-Length': body.length })
    if (act === 'break off within') {
      response.write(body.slice(0, body.length / 2))
      setImmediate(() => response.socket?.destroy())
    } else response.end(body)
  }
  if (act === 'break off after') response.socket?.destroy()
  else if (act === 'answer late') setTimeout(answer, random.between(20, 200))
  else if (act === 'answer slowly') setTimeout(answer, random.between(300, 2500))
  else answer()
}

function actOf(random: Random): Act {
  let left = random.next() * TOTAL
  return ACTS.find((act) => (left -= WEIGHTS[act]) < 0) ?? 'answer'
}
