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

/** A variable: no dashboard is bound to one Prometheus. */
export const DATASOURCE = { type: 'prometheus', uid: '${datasource}' }

/** Grafana's names (linter: panel-units-rule). */
export type Unit = 'short' | 'reqps' | 'ops' | 's' | 'percentunit' | 'bytes' | 'bool_yes_no' | 'none'

export interface Query {
  readonly expr: string
  /** Of one series: `{{label}}`. */
  readonly legend: string
}

interface Basics {
  readonly title: string
  readonly description: string
  readonly unit: Unit
  readonly queries: readonly Query[]
  /** Of 24 columns. */
  readonly width: number
}

/** Values from which a panel is yellow or red; green below. */
export interface Limits {
  readonly yellow?: number
  readonly red?: number
}

export interface Graph extends Basics {
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

export interface Figure extends Basics {
  readonly limits?: Limits
  /** Names of values. */
  readonly names?: Readonly<Record<string, string>>
  /** Shows the legend instead of the value. */
  readonly name?: true
}

/** One figure at the end of the selected time range, or over all of it if the query uses `$__range`. */
export function stat({
  title,
  description,
  unit,
  queries,
  width,
  limits,
  names,
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
    .mappings(names === undefined ? [] : [mapping(names)])
    .targets(queries.map((query, n) => target(query, n).instant()))
}

/** Hits per histogram bucket in the selected time range. */
export function buckets({ title, description, unit, queries, width }: Basics): Builder<Panel> {
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

function mapping(names: Readonly<Record<string, string>>): ValueMapping {
  const options = Object.entries(names).map(([value, text], index) => [value, { text, index }] as const)
  return { type: MappingType.ValueToText, options: Object.fromEntries(options) }
}
