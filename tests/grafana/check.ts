// The dashboard as JSON against Grafana's own types. `test_dashboard.py` appends the values.
import type { AnnotationQuery, Dashboard, DataQuery } from "@grafana/schema";
import type * as BarGauge from "@grafana/schema/dist/esm/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen";
import type * as Stat from "@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen";
import type * as StateTimeline from "@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen";
import type * as Table from "@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen";
import type * as TimeSeries from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";

/** A type as JSON can write it: an enumeration is one of its texts. */
type Json<T> = T extends string ? `${T}` : T extends (infer U)[] ? Json<U>[]
  : T extends object ? { [K in keyof T]: Json<T[K]> } : T;

/** The schema knows only Grafana's own annotations; Prometheus' have an expression. */
type Annotation = Json<Omit<AnnotationQuery, "target">> & { target: { refId: string; expr: string; interval: string }; titleFormat: string };
type Ours = Omit<Json<Dashboard>, "annotations"> & { annotations: { list: Annotation[] } };

/** A Prometheus query (the schema package leaves it to the plugin). */
type Query = Json<DataQuery> & { expr: string; legendFormat: string; instant?: boolean; range: boolean; format?: "time_series" | "table" };

type OptionsOf = {
  timeseries: Json<TimeSeries.Options>; stat: Json<Stat.Options>; bargauge: Json<Partial<BarGauge.Options>>;
  table: Json<Table.Options>; "state-timeline": Json<StateTimeline.Options>;
};
type CustomOf = {
  timeseries: Json<TimeSeries.FieldConfig>; table: Json<Partial<Table.FieldConfig>>; "state-timeline": Json<StateTimeline.FieldConfig>;
};
