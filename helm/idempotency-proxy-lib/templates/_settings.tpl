{{/*
The templates that charts include take the chart's root context. All of them render nothing where
idempotencyProxy.enabled is false, and refuse what Kubernetes would accept and what would lose records or requests.
*/}}

{{/* At most so many characters of a name; what is longer stays different from others by a hash. */}}
{{- define "idempotency-proxy.shortened" -}}
{{- if gt (len .name) (int .most) -}}
{{- printf "%s-%s" (.name | trunc (int (sub .most 9)) | trimSuffix "-") (.name | sha256sum | trunc 8) -}}
{{- else -}}
{{- .name -}}
{{- end -}}
{{- end }}

{{/* The name of what the proxy owns. An umbrella chart may have several charts that include the proxy. */}}
{{- define "idempotency-proxy.name" -}}
{{- $app := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) .Chart.IsRoot -}}
{{- include "idempotency-proxy.shortened" (dict "most" 63 "name" (printf "%s-idempotency-proxy" $app)) -}}
{{- end }}

{{/*
What sets its records apart from all others on the same store. The namespace is the one that the pod runs in: `helm template` without
--namespace knows another. No two charts of a cluster have the same name: a namespace has no dot, a release no underscore.
*/}}
{{- define "idempotency-proxy.service" -}}
{{- .Values.idempotencyProxy.service | default (printf "${POD_NAMESPACE}.%s" (ternary .Release.Name (printf "%s_%s" .Release.Name .Chart.Name) .Chart.IsRoot)) -}}
{{- end }}

{{- define "idempotency-proxy.labels" -}}
app.kubernetes.io/name: idempotency-proxy
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Subcharts.idempotencyProxy.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "idempotency-proxy.enabled" -}}
{{- if not (hasKey .Values "idempotencyProxy") -}}
{{- fail "The dependency idempotency-proxy-lib has to have `alias: idempotencyProxy` in Chart.yaml: its values lie there." -}}
{{- end -}}
{{- if .Values.idempotencyProxy.enabled -}}
{{- include "idempotency-proxy.validate" . -}}
true
{{- end -}}
{{- end }}

{{/* How many pods there may be at most; 0 where nobody says. */}}
{{- define "idempotency-proxy.maxReplicas" -}}
{{- $autoscaling := dict -}}
{{- if kindIs "map" .Values.autoscaling -}}
{{- $autoscaling = .Values.autoscaling -}}
{{- end -}}
{{- if ne (toString .Values.idempotencyProxy.maxReplicas) "auto" -}}
{{- int .Values.idempotencyProxy.maxReplicas -}}
{{- else if $autoscaling.enabled -}}
{{- int $autoscaling.maxReplicas -}}
{{- else if not (kindIs "invalid" .Values.replicaCount) -}}
{{- int .Values.replicaCount -}}
{{- else -}}
0
{{- end -}}
{{- end }}

{{/* Seconds from the end of the pod's life. The proxy stops before its app does, which finishes what runs. */}}
{{- define "idempotency-proxy.drainDelay" -}}
{{- $proxy := .Values.idempotencyProxy -}}
{{- if ne (toString $proxy.drain.delaySeconds) "auto" -}}
{{- int $proxy.drain.delaySeconds -}}
{{- else if eq $proxy.mode "gateway" -}}
5
{{- else if and (eq $proxy.mode "native") (ne $proxy.drain.hook "signal") -}}
0
{{- else -}}
{{- max 0 (sub (int $proxy.preStopSleepSeconds) 2) -}}
{{- end -}}
{{- end }}

{{- define "idempotency-proxy.drainTimeout" -}}
{{- $proxy := .Values.idempotencyProxy -}}
{{- if eq (toString $proxy.drain.timeoutSeconds) "auto" -}}
{{- add (int $proxy.upstream.timeoutSeconds) 5 -}}
{{- else -}}
{{- int $proxy.drain.timeoutSeconds -}}
{{- end -}}
{{- end }}

{{/* The app's pause, the drain, and room to store what is left: also where the proxy hears of the end only after the app. */}}
{{- define "idempotency-proxy.gracePeriod" -}}
{{- $proxy := .Values.idempotencyProxy -}}
{{- $pause := ternary 0 (int $proxy.preStopSleepSeconds) (eq $proxy.mode "gateway") -}}
{{- $least := add $pause (include "idempotency-proxy.drainDelay" . | int) (include "idempotency-proxy.drainTimeout" . | int) 10 -}}
{{- if eq (toString $proxy.terminationGracePeriodSeconds) "auto" -}}
{{- $least -}}
{{- else if lt (int $proxy.terminationGracePeriodSeconds) (int $least) -}}
{{- fail (printf "idempotencyProxy.terminationGracePeriodSeconds %d is too short: calls that are running would be cut off. It takes %d." (int $proxy.terminationGracePeriodSeconds) (int $least)) -}}
{{- else -}}
{{- int $proxy.terminationGracePeriodSeconds -}}
{{- end -}}
{{- end }}
