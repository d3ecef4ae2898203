import { connect } from 'node:net'
import { DatabaseSync } from 'node:sqlite'
import t, { type Test } from 'tap'
import { configFile, gate, newKey, send, sqliteSnapshot, tempDir, until } from '../support/e2e.ts'
import { type ChildProxy, proxyProcess } from '../support/proxy.ts'
import { post } from '../support/raw.ts'
import { type Relay, relay } from '../support/relay.ts'
import { SHARED, type SharedKind, type SharedServer, sharedServers } from '../support/shared.ts'
import { tcpStub, type UpstreamStub, upstreamStub } from '../support/upstream.ts'

t.setTimeout(600_000)

/** What a killed proxy leaves behind, as a retry sees it before and after the lease. */
type Left = 'nothing' | 'claim' | 'answer'

interface World {
  readonly t: Test
  readonly kind: SharedKind | 'sqlite'
  readonly key: string
  readonly path: string
  readonly upstream: UpstreamStub
  /** Between the doomed proxy and its store; unused with SQLite. */
  readonly wire: Relay
  /** What identifies the commands in the bytes sent to the store. */
  readonly sends: SharedServer['wire']
  /** Where the embedded store is. */
  readonly file: string
  /** Starts the proxy that will be killed. */
  start(upstreamUrl?: string): Promise<ChildProxy>
}

interface Stage {
  readonly title: string
  readonly id: string
  readonly kinds: readonly World['kind'][]
  readonly left: Left
  /** How often the upstream executed before the kill, and ever after where anything is left. */
  readonly executed: 0 | 1
  /** Brings a proxy to this point and kills it there. */
  readonly kill: (world: World) => Promise<void>
}

const ALL = ['redis', 'postgres', 'sqlite'] as const
const REMOTE = ['redis', 'postgres'] as const
const BIG = 4 * 1024 * 1024
const BODY = '{"amount":1}'

/** A request that never gets its response. */
function ask({ key, path }: World, proxy: ChildProxy, body = BODY): Promise<unknown> {
  return send(proxy, key, { path, body }).catch((error: unknown) => error)
}

async function end(proxy: ChildProxy, asked: Promise<unknown>, t: Test): Promise<void> {
  proxy.kill('SIGKILL')
  t.equal(await proxy.exited, 'SIGKILL')
  t.ok((await asked) instanceof Error, 'the client gets no complete response')
}

/** Resolves when a piece with these bytes passes; `onPiece` is called first, in the same turn. */
function passing(
  wire: Relay,
  way: 'onCommand' | 'onReply',
  isIt: (bytes: Buffer) => boolean,
  onPiece = (): void => {},
) {
  const { opened, open } = gate()
  wire[way] = (piece) => {
    if (!isIt(piece)) return
    onPiece()
    open()
  }
  return opened
}

/** The store has executed that command, and the process never gets the reply. */
async function killBeforeReply(world: World, command: 'claim' | 'outcome'): Promise<void> {
  const { wire, sends, t } = world
  const proxy = await world.start()
  const replied = gate()
  const sent = passing(wire, 'onCommand', sends[command], () => {
    wire.passReplies = false
    wire.onReply = () => replied.open()
  })
  const asked = ask(world, proxy)
  await sent
  await replied.opened
  await end(proxy, asked, t)
}

/** The command never reaches the store. */
async function killBeforeStore(world: World, command: 'claim' | 'outcome'): Promise<void> {
  const { wire, sends, t } = world
  const proxy = await world.start()
  const sent = passing(wire, 'onCommand', sends[command], () => {
    wire.passCommands = false
  })
  const asked = ask(world, proxy)
  await sent
  await end(proxy, asked, t)
}

const STAGES: readonly Stage[] = [
  {
    title: 'before the claim: half the body is uploaded',
    id: 'X06',
    kinds: ALL,
    left: 'nothing',
    executed: 0,
    async kill(world) {
      const proxy = await world.start()
      const socket = connect(proxy.port, '127.0.0.1').on('error', () => {})
      const bytes = post(world.path, world.key, BODY, ['Authorization: Bearer alice'])
      socket.write(bytes.slice(0, -6))
      await until(async () => (await proxy.metric('idempotency_buffered_bytes')) > 0)
      proxy.kill('SIGKILL')
      await proxy.exited
      socket.destroy()
    },
  },
  {
    title: 'while the claim is on its way to the store',
    id: 'X06',
    kinds: REMOTE,
    left: 'nothing',
    executed: 0,
    kill: (world) => killBeforeStore(world, 'claim'),
  },
  {
    title: 'after the claim, before its reply',
    id: 'X06',
    kinds: REMOTE,
    left: 'claim',
    executed: 0,
    kill: (world) => killBeforeReply(world, 'claim'),
  },
  {
    title: 'after the claim, before a connection to the upstream is usable',
    id: 'X06',
    kinds: ALL,
    left: 'claim',
    executed: 0,
    async kill(world) {
      const { opened, open } = gate()
      // It accepts connections and never completes a handshake.
      await using silent = await tcpStub((socket) => socket.once('data', open))
      const proxy = await world.start(silent.url.replace('http:', 'https:'))
      const asked = ask(world, proxy)
      await opened
      await end(proxy, asked, world.t)
    },
  },
  {
    title: 'after the upstream has read half of the request body',
    id: 'X06',
    kinds: ALL,
    left: 'claim',
    executed: 0,
    async kill(world) {
      const { opened, open } = gate()
      const body = JSON.stringify({ text: 'x'.repeat(900_000) })
      await using half = await tcpStub((socket) => {
        let read = 0
        socket.on('data', (chunk) => {
          read += chunk.length
          if (read < body.length / 2) return
          socket.pause()
          open()
        })
      })
      const proxy = await world.start(half.url)
      const asked = ask(world, proxy, body)
      await opened
      await end(proxy, asked, world.t)
      world.t.equal(half.sockets.length, 1, 'it was sent once')
    },
  },
  {
    title: 'after the upstream executed, before it answers',
    id: 'X06',
    kinds: ALL,
    left: 'claim',
    executed: 1,
    async kill(world) {
      const proxy = await world.start()
      const asked = ask({ ...world, path: `${world.path}/silent` }, proxy)
      await arrival(world, `${world.path}/silent`)
      await end(proxy, asked, world.t)
    },
  },
  {
    title: 'after the upstream answered, before the store has the outcome',
    id: 'X06',
    kinds: REMOTE,
    left: 'claim',
    executed: 1,
    kill: (world) => killBeforeStore(world, 'outcome'),
  },
  {
    title: 'after the client was answered, while the store refuses the outcome',
    id: 'X06',
    kinds: ['sqlite'],
    left: 'claim',
    executed: 1,
    async kill(world) {
      const proxy = await world.start()
      const path = `${world.path}/gated`
      const asked = send(proxy, world.key, { path })
      await arrival(world, path)
      const lock = new DatabaseSync(world.file)
      lock.exec('BEGIN IMMEDIATE')
      held.get(path)?.open()
      world.t.equal((await asked).status, 201, 'the client still gets its response')
      await proxy.logged(({ msg }) => /did not take an outcome/.test(String(msg)))
      proxy.kill('SIGKILL')
      await proxy.exited
      lock.exec('ROLLBACK')
      lock.close()
    },
  },
  {
    title: 'after the outcome is stored, before the first byte of the response',
    id: 'X03 X06',
    kinds: REMOTE,
    left: 'answer',
    executed: 1,
    kill: (world) => killBeforeReply(world, 'outcome'),
  },
  {
    title: 'after half of the response is delivered',
    id: 'X03 X06',
    kinds: ALL,
    left: 'answer',
    executed: 1,
    async kill(world) {
      const proxy = await world.start()
      const { opened, open } = gate()
      const socket = connect(proxy.port, '127.0.0.1').on('error', () => {})
      let read = 0
      socket.on('data', (chunk: Buffer) => {
        read += chunk.length
        if (read < BIG / 4) return
        socket.pause()
        open()
      })
      socket.write(post(`${world.path}/big`, world.key, BODY, ['Authorization: Bearer alice']))
      await opened
      proxy.kill('SIGKILL')
      await proxy.exited
      socket.destroy()
      world.t.ok(read < BIG, `the client has ${read} of ${BIG} bytes`)
    },
  },
]

/** The gates that hold requests to `…/gated`, by target. */
const held = new Map<string, ReturnType<typeof gate>>()

async function arrival({ upstream }: World, path: string): Promise<void> {
  await until(() => upstream.seen.some(({ target }) => target === path))
}

const SUFFIX: Readonly<Record<string, string>> = {
  'after the upstream executed, before it answers': '/silent',
  'after the client was answered, while the store refuses the outcome': '/gated',
  'after half of the response is delivered': '/big',
}

const servers = await sharedServers(t)

// Profiles do not depend on the store: one is enough on PostgreSQL.
for (const kind of [...SHARED, 'sqlite'] as const)
  for (const profile of kind === 'postgres' ? (['strict'] as const) : (['standard', 'strict'] as const))
    void t.test(`X06 X03 kill -9 at every step: ${kind}, profile ${profile}`, async (t) => {
      const server = kind === 'sqlite' ? null : servers[kind]
      await server?.clear()
      const dir = tempDir(t)
      const file = `${dir}/store.db`
      // Those that are judged by their answers wait for a slow store.
      const settings = (upstreamUrl: string, store: string, timeout = '2s', lease = '3s') =>
        configFile(
          dir,
          `upstream: { url: "${upstreamUrl}" }
store: { url: "${store}", timeout: ${timeout} }
defaults: { profile: ${profile}, lease: ${lease}, scope: { caller: "header:authorization" } }`,
        )
      const upstream = await upstreamStub(async ({ target }, response) => {
        if (target.endsWith('/silent')) return
        if (target.endsWith('/gated')) {
          const mine = gate()
          held.set(target, mine)
          await mine.opened
        }
        response.writeHead(201, { 'x-target': target })
        response.end(target.endsWith('/big') ? Buffer.alloc(BIG, target) : `done ${target}`)
      })
      t.teardown(() => upstream[Symbol.asyncDispose]())
      const store = server?.url ?? `sqlite:${file}`
      const survivor = await proxyProcess(settings(upstream.url, store))
      t.teardown(() => survivor[Symbol.asyncDispose]())

      const stages = STAGES.filter(({ kinds }) => kinds.includes(kind)).map((stage, n) => {
        const path = `/stage/${n}`
        return { ...stage, key: newKey(), path, target: `${path}${SUFFIX[stage.title] ?? ''}` }
      })
      const times = (target: string) => upstream.seen.filter((seen) => seen.target === target).length
      const body = ({ title }: Stage) =>
        title.includes('half of the request body') ? JSON.stringify({ text: 'x'.repeat(900_000) }) : BODY
      const check = async (t: Test, stage: (typeof stages)[number], proxy: ChildProxy, late: boolean) => {
        const retry = await send(proxy, stage.key, { path: stage.target, body: body(stage) })
        if (stage.left === 'claim') {
          const code = late ? 'idempotency_outcome_unknown' : 'idempotency_key_in_progress'
          t.strictSame([retry.status, retry.code], [409, code])
          t.ok(Number(retry.headers.get('retry-after')) >= 1)
          t.equal(times(stage.target), stage.executed, `N = ${stage.executed}`)
          return
        }
        const answer = stage.target.endsWith('/big')
          ? Buffer.alloc(BIG, stage.target).toString()
          : `done ${stage.target}`
        t.equal(retry.status, 201)
        t.ok(retry.body === answer, 'the response is complete')
        t.equal(retry.replayed, stage.left === 'answer' || late)
        t.equal(times(stage.target), 1, 'N = 1')
      }

      for (const stage of stages)
        await t.test(`${stage.id} kill -9 ${stage.title}, then a retry at once`, async (t) => {
          await using wire = await relay(server?.port ?? 0)
          const through = server?.through(wire.port) ?? store
          const sends = server?.wire ?? servers.redis.wire
          let doomed: ChildProxy | undefined
          // Once it has passed, the client is answered though only this process has the outcome (contract §7): here it must be stored first.
          const [timeout, lease] = stage.left === 'answer' ? ['20s', '30s'] : ['500ms', '3s']
          const start = async (url = upstream.url) =>
            (doomed = await proxyProcess(settings(url, through, timeout, lease)))
          try {
            await stage.kill({
              t,
              kind,
              key: stage.key,
              path: stage.path,
              upstream,
              wire,
              sends,
              file,
              start,
            })
          } finally {
            await doomed?.[Symbol.asyncDispose]()
          }
          t.equal(times(stage.target), stage.executed)
          await check(t, stage, survivor, false)
        })

      survivor.kill('SIGKILL')
      await survivor.exited
      await using restarted = await proxyProcess(settings(upstream.url, store))
      const lapsed = stages.findLast(({ left }) => left === 'claim') as (typeof stages)[number]
      await until(async () => {
        const last = await send(restarted, lapsed.key, { path: lapsed.target, body: body(lapsed) })
        return last.code === 'idempotency_outcome_unknown'
      })
      for (const stage of stages)
        await t.test(`${stage.id} kill -9 ${stage.title}, then a retry after the lease and a restart`, (t) =>
          check(t, stage, restarted, true),
        )
      if (kind === 'sqlite') t.equal(sqliteSnapshot(file).length, stages.length)
    })
