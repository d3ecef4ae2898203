import { PanelBuilder as BarGauge } from '@grafana/grafana-foundation-sdk/bargauge'
import type { Builder } from '@grafana/grafana-foundation-sdk/cog'
import {
  BigValueColorMode,
  BigValueGraphMode,
  BigValueTextMode,
  GraphDrawStyle,
  LegendDisplayMode,
  LegendPlacement,
  ReduceDataOptionsBuilder,
  SortOrder,
  StackingConfigBuilder,
  StackingMode,
  TooltipDisplayMode,
  VisibilityMode,
  VizLegendOptionsBuilder,
  VizOrientation,
  VizTooltipOptionsBuilder,
} from '@grafana/grafana-foundation-sdk/common'
import {
  FieldColorBuilder,
  FieldColorModeId,
  MappingType,
  type Panel,
  ThresholdsConfigBuilder,
  ThresholdsMode,
  type ValueMapping,
} from '@grafana/grafana-foundation-sdk/dashboard'
import { DataqueryBuilder, PromQueryFormat } from '@grafana/grafana-foundation-sdk/prometheus'
import { PanelBuilder as Stat } from '@grafana/grafana-foundation-sdk/stat'
import { PanelBuilder as TimeSeries } from '@grafana/grafana-foundation-sdk/timeseries'

/** The variable that says where data come from: no dashboard is bound to one Prometheus. */
export const DATASOURCE = { type: 'prometheus', uid: '${datasource}' }

/** Grafana's names (linter: panel-units-rule). */
export type Unit = 'short' | 'reqps' | 'ops' | 's' | 'percentunit' | 'bytes' | 'bool_yes_no' | 'none'

export interface Query {
  readonly expr: string
  /** Of one series: `{{label}}`. */
  readonly legend: string
}

interface Said {
  readonly title: string
  readonly description: string
  readonly unit: Unit
  readonly queries: readonly Query[]
  /** Of 24 columns. */
  readonly width: number
}

/** From which value on a panel is yellow or red; green below. */
export interface Limits {
  readonly yellow?: number
  readonly red?: number
}

export interface Graph extends Said {
  readonly stacked?: true
  readonly max?: number
}

export function graph({ title, description, unit, queries, width, stacked, max }: Graph): Builder<Panel> {
  const panel = new TimeSeries()
    .title(title)
    .description(description)
    .datasource(DATASOURCE)
    .unit(unit)
    .min(0)
    .height(8)
    .span(width)
    .drawStyle(GraphDrawStyle.Line)
    .fillOpacity(stacked ? 30 : 8)
    .showPoints(VisibilityMode.Never)
    .legend(
      new VizLegendOptionsBuilder()
        .displayMode(LegendDisplayMode.Table)
        .placement(LegendPlacement.Bottom)
        .showLegend(true)
        .calcs(['mean', 'max', 'lastNotNull']),
    )
    .tooltip(new VizTooltipOptionsBuilder().mode(TooltipDisplayMode.Multi).sort(SortOrder.Descending))
    .targets(queries.map((query, n) => target(query, n).range()))
  if (stacked) panel.stacking(new StackingConfigBuilder().mode(StackingMode.Normal).group('A'))
  if (max !== undefined) panel.max(max)
  return panel
}

export interface Figure extends Said {
  readonly limits?: Limits
  /** What a value is called. */
  readonly called?: Readonly<Record<string, string>>
  /** Shows what the legend says instead of the value. */
  readonly name?: true
}

/** One figure for the end of the time looked at, or for all of it where the query says `$__range`. */
export function stat({
  title,
  description,
  unit,
  queries,
  width,
  limits,
  called,
  name,
}: Figure): Builder<Panel> {
  return new Stat()
    .title(title)
    .description(description)
    .datasource(DATASOURCE)
    .unit(unit)
    .height(4)
    .span(width)
    .graphMode(BigValueGraphMode.None)
    .colorMode(limits === undefined ? BigValueColorMode.None : BigValueColorMode.Background)
    .textMode(name ? BigValueTextMode.Name : BigValueTextMode.Auto)
    .reduceOptions(new ReduceDataOptionsBuilder().calcs(['lastNotNull']))
    .thresholds(thresholds(limits))
    .mappings(called === undefined ? [] : [mapping(called)])
    .targets(queries.map((query, n) => target(query, n).instant()))
}

/** How often each bucket of a histogram was hit in the time looked at. */
export function buckets({ title, description, unit, queries, width }: Said): Builder<Panel> {
  return new BarGauge()
    .title(title)
    .description(description)
    .datasource(DATASOURCE)
    .unit(unit)
    .min(0)
    .height(8)
    .span(width)
    .orientation(VizOrientation.Horizontal)
    .colorScheme(new FieldColorBuilder().mode(FieldColorModeId.Fixed).fixedColor('blue'))
    .reduceOptions(new ReduceDataOptionsBuilder().calcs(['lastNotNull']))
    .targets(queries.map((query, n) => target(query, n).instant().format(PromQueryFormat.Heatmap)))
}

function target({ expr, legend }: Query, n: number): DataqueryBuilder {
  return new DataqueryBuilder()
    .refId(String.fromCharCode(65 + n))
    .datasource(DATASOURCE)
    .expr(expr)
    .legendFormat(legend)
}

function thresholds({ yellow, red }: Limits = {}): ThresholdsConfigBuilder {
  return new ThresholdsConfigBuilder().mode(ThresholdsMode.Absolute).steps([
    // Below every other one: Grafana writes null for no bound.
    { value: null, color: 'green' },
    ...(yellow === undefined ? [] : [{ value: yellow, color: 'yellow' }]),
    ...(red === undefined ? [] : [{ value: red, color: 'red' }]),
  ])
}

function mapping(called: Readonly<Record<string, string>>): ValueMapping {
  const options = Object.entries(called).map(([value, text], index) => [value, { text, index }] as const)
  return { type: MappingType.ValueToText, options: Object.fromEntries(options) }
}
