import type { Config } from '../config/config.ts'
import { openStore } from '../store/open.ts'
import { type CheckResult, finding } from './check-result.ts'
import { type Args, type Command, FINDING, FINE, type Io, usage } from './command.ts'
import { auditChecks, configChecks, spoolChecks } from './doctor-files.ts'
import { proxyChecks } from './doctor-proxy.ts'
import { recordChecks, storeChecks } from './doctor-store.ts'
import { openAdmin, SOURCE_OPTIONS, storeConfig } from './target-options.ts'
import { json, table } from './terminal.ts'

export const doctor: Command = {
  name: 'doctor',
  usage: ['doctor [--config FILE] [--store URL] [--service NAME] [--admin URL --token-file FILE]'],
  about: [
    'looks at the configuration, the store, its records, the spool, the audit log, and with --admin at a running proxy;',
    'exit 1 where something is wrong. It changes nothing but one bucket of a rate limit, which is gone a second later.',
  ],
  options: {
    json: { value: null, help: 'for programs: [{"check", "found": "fine" | "note" | "finding", "detail"}]' },
    ...SOURCE_OPTIONS,
  },
  run: runDoctor,
}

async function runDoctor(args: Args, io: Io): Promise<number> {
  if (args.positionals.length > 0)
    return usage(io, `doctor takes no argument, found ${args.positionals.length}`)
  const own = args.has('config') || args.has('store')
  if (!own && !args.has('admin'))
    return usage(
      io,
      'where to look? Give --config FILE or --store URL, or --admin URL --token-file FILE, or both',
    )
  if (args.has('token-file') && !args.has('admin')) return usage(io, 'found --token-file without --admin URL')
  if (args.has('service') && !own) return usage(io, 'found --service without --config FILE or --store URL')
  const checked: CheckResult[] = []
  if (own) {
    const config = storeConfig(args, io)
    if (!config.ok) return config.code
    if (args.has('config')) checked.push(...configChecks(config.value))
    checked.push(...(await storeSide(config.value)))
    checked.push(...(await spoolChecks(config.value)), ...(await auditChecks(config.value)))
  }
  if (args.has('admin')) {
    const admin = openAdmin(args, io)
    if (!admin.ok) return admin.code
    await using source = admin.value
    checked.push(...(await proxyChecks(source, new URL(args.text('admin') as string).origin)))
  }
  if (args.has('json')) io.out(json(checked))
  else
    io.out(
      table(
        checked.map(({ check, found, detail }) => [found === 'finding' ? 'FINDING' : found, check, detail]),
      ),
    )
  return checked.some(({ found }) => found === 'finding') ? FINDING : FINE
}

async function storeSide(config: Config): Promise<CheckResult[]> {
  let store: Awaited<ReturnType<typeof openStore>>
  try {
    store = await openStore(config, { onEvent: () => {}, onBreaker: () => {} })
  } catch (error) {
    return [finding('store', (error as Error).message)]
  }
  try {
    const { up, checked } = await storeChecks(store, config)
    if (!up) return checked
    const looked = await recordChecks(store).catch((error: unknown) => [
      finding('records', (error as Error).message),
    ])
    return [...checked, ...looked]
  } finally {
    await store.close()
  }
}
