import { spawnSync } from 'node:child_process'
import { existsSync, readdirSync, readFileSync } from 'node:fs'
import { fileURLToPath } from 'node:url'
import t from 'tap'
import { parse } from 'yaml'
import { REFUSALS } from '../../src/core/refusal.ts'
import { RULES, RULES_FILE } from '../support/alerts.ts'
import { unknownTo } from '../support/known-metrics.ts'
import { WITHOUT } from '../support/prometheus.ts'

interface Tested {
  readonly name: string
  readonly alert_rule_test: readonly {
    readonly eval_time: string
    readonly alertname: string
    readonly exp_alerts: readonly unknown[]
  }[]
}

const TESTS = ['rules.test.yaml', 'rules.days.test.yaml'].map((file) =>
  fileURLToPath(new URL(`../../alerts/${file}`, import.meta.url)),
)
const RUNBOOKS = new URL('../../docs/runbooks/', import.meta.url)

const names = RULES.map(({ alert }) => alert)

/** What somebody on call needs, in this order, after what the alert means. */
const SECTIONS = ['Look first', 'What to do', 'What not to do']

void t.test('every alert has a summary, a description, a severity and a runbook link', async (t) => {
  t.equal(new Set(names).size, names.length)
  for (const { alert, labels, annotations } of RULES) {
    t.match(alert, /^Idempotency[A-Z]\w+$/)
    t.match(labels.severity, /^(?:critical|warning)$/, alert)
    t.ok(annotations.summary.length > 10 && annotations.description.length > 40, alert)
    t.ok(annotations.runbook_url.endsWith(`/runbooks/${alert}.md`), alert)
  }
})

void t.test('dead letters and orphans fire at once', async (t) => {
  for (const alert of ['IdempotencyDeadLettered', 'IdempotencyOrphaned'])
    t.match(
      RULES.find((rule) => rule.alert === alert),
      { for: undefined, labels: { severity: 'critical' } },
      alert,
    )
})

void t.test('alerts use only metrics, labels and values that a proxy has', async (t) => {
  for (const { alert, expr } of RULES) t.same(unknownTo(expr), [], alert)
})

void t.test('every alert has a runbook, and every runbook an alert', async (t) => {
  t.same(
    readdirSync(RUNBOOKS)
      .filter((file) => file !== 'README.md')
      .sort(),
    names.map((name) => `${name}.md`).sort(),
  )
  const monitoring = readFileSync(new URL('../../docs/monitoring.md', import.meta.url), 'utf8')
  for (const { alert, labels } of RULES) {
    const text = readFileSync(new URL(`${alert}.md`, RUNBOOKS), 'utf8')
    t.ok(text.startsWith(`# ${alert}\n`), `${alert}: its title`)
    t.same(
      [...text.matchAll(/^## (.*)$/gm)].map(([, title]) => title),
      SECTIONS,
      `${alert}: its sections`,
    )
    t.match(text, new RegExp(`^Severity: ${labels.severity}\\.`, 'm'), `${alert}: its severity`)
    t.ok(monitoring.includes(`(runbooks/${alert}.md)`), `docs/monitoring.md leads to ${alert}`)
    for (const [, to = ''] of text.matchAll(/\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)/g))
      t.ok(existsSync(new URL(to, RUNBOOKS)), `${alert}: ${to} is there`)
    for (const { metric, problems } of mentions(text)) t.same(problems, [], `${alert}: ${metric}`)
  }
})

void t.test('the commands in runbooks exist, with their flags', async (t) => {
  const documented = readFileSync(new URL('../../docs/cli.md', import.meta.url), 'utf8')
  let seen = 0
  for (const { alert } of RULES) {
    const text = readFileSync(new URL(`${alert}.md`, RUNBOOKS), 'utf8')
    for (const [, command = '', rest = ''] of text.matchAll(/idempotency-proxy ([a-z]+)\b([^\n`]*)/g)) {
      seen++
      const section = new RegExp(`## \`${command}\`([\\s\\S]*?)(?=\n## |$)`).exec(documented)?.[1] ?? ''
      t.ok(section, `${alert}: ${command}`)
      for (const [flag] of rest.matchAll(/--[a-z-]+/g))
        t.ok(section.includes(flag), `${alert}: ${command} ${flag}`)
    }
  }
  t.ok(seen > 20, `${seen} commands`)
})

void t.test('the rule tests show every alert firing, not firing and resolving', async (t) => {
  const tests = TESTS.flatMap((file) => (parse(readFileSync(file, 'utf8')) as { tests: Tested[] }).tests)
  for (const alert of names) {
    const own = tests.filter(({ alert_rule_test }) => alert_rule_test.every((one) => one.alertname === alert))
    const runs = own.map(({ alert_rule_test }) =>
      alert_rule_test.map(({ exp_alerts }) => exp_alerts.length > 0),
    )
    t.ok(
      runs.some((fired) => fired[0] === false && fired.includes(true) && fired.at(-1) === false),
      `${alert} fires and resolves`,
    )
    t.ok(
      runs.some((fired) => !fired.includes(true)),
      `${alert} does not fire`,
    )
  }
  t.same(
    tests
      .flatMap(({ alert_rule_test }) => alert_rule_test.map(({ alertname }) => alertname))
      .filter((name) => !names.includes(name)),
    [],
  )
})

void t.test('promtool accepts the rules and their tests', { skip: WITHOUT }, async (t) => {
  for (const args of [
    ['check', 'rules', '--lint=all', '--lint-fatal', RULES_FILE],
    ['test', 'rules', ...TESTS],
  ]) {
    const { status, stdout, stderr } = spawnSync('promtool', args, { encoding: 'utf8' })
    t.equal(status, 0, `${args.join(' ')}\n${stdout}${stderr}`)
  }
})

/** Queries in a runbook's code. */
function mentions(text: string): { metric: string; problems: string[] }[] {
  return [...text.matchAll(/`([^`\n]*idempotency_[^`\n]*)`/g)].map(([, query = '']) => ({
    metric: query,
    problems: query in REFUSALS ? [] : unknownTo(query),
  }))
}
