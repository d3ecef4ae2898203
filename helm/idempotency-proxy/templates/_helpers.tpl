{{- define "idempotency-proxy.name" -}}
{{- .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "idempotency-proxy.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "idempotency-proxy.selectorLabels" -}}
app.kubernetes.io/name: {{ include "idempotency-proxy.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "idempotency-proxy.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "idempotency-proxy.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* Refuses what would be accepted by Kubernetes and lose records or requests. */}}
{{- define "idempotency-proxy.validate" -}}
{{- $store := .Values.store -}}
{{- if and (not $store.url) (not $store.existingSecret.name) -}}
{{- fail "Set store.url (such as redis://redis:6379/0) or store.existingSecret.name: the replicas share their records there." -}}
{{- end -}}
{{- if and $store.url $store.existingSecret.name -}}
{{- fail "Set store.url or store.existingSecret.name, not both." -}}
{{- end -}}
{{- if and $store.url (regexMatch "^(memory|sqlite):" $store.url) -}}
{{- fail (printf "store.url %q would lie inside one pod and be lost with it, and what it recorded would then be executed again. Use a Redis." $store.url) -}}
{{- end -}}
{{- $config := .Values.proxy.config -}}
{{- range $key := list "listen" "ops" -}}
{{- if hasKey $config $key -}}
{{- fail (printf "proxy.config.%s is set by the chart: use proxy.port and proxy.opsPort." $key) -}}
{{- end -}}
{{- end -}}
{{- $upstream := default dict $config.upstream -}}
{{- if or (hasKey $upstream "url") (hasKey $upstream "timeout") -}}
{{- fail "proxy.config.upstream.url and .timeout are set by the chart: use app.port and proxy.upstreamTimeoutSeconds." -}}
{{- end -}}
{{- if hasKey (default dict $config.store) "url" -}}
{{- fail "proxy.config.store.url is set by the chart: use store.url or store.existingSecret." -}}
{{- end -}}
{{- end }}

{{/* The proxy's configuration file: the chart's part laid over the user's. */}}
{{- define "idempotency-proxy.config" -}}
{{- $own := dict
      "listen" (printf "0.0.0.0:%d" (int .Values.proxy.port))
      "ops" (dict "listen" (printf "0.0.0.0:%d" (int .Values.proxy.opsPort)))
      "upstream" (dict
        "url" (printf "http://127.0.0.1:%d" (int .Values.app.port))
        "timeout" (printf "%ds" (int .Values.proxy.upstreamTimeoutSeconds)))
      "store" (dict "url" "${STORE_URL}") -}}
{{- mustMergeOverwrite (deepCopy .Values.proxy.config) $own | toYaml }}
{{- end }}

{{/* The app's pause, the longest call, the proxy's own 5 s on top of it, and room to store what is left. */}}
{{- define "idempotency-proxy.gracePeriod" -}}
{{- $least := add (int .Values.app.preStopSleepSeconds) (int .Values.proxy.upstreamTimeoutSeconds) 15 -}}
{{- $wanted := .Values.terminationGracePeriodSeconds -}}
{{- if kindIs "invalid" $wanted -}}
{{- $least -}}
{{- else if lt (int $wanted) (int $least) -}}
{{- fail (printf "terminationGracePeriodSeconds %d is too short: calls that are running would be cut off. It takes %d (app.preStopSleepSeconds + proxy.upstreamTimeoutSeconds + 15)." (int $wanted) (int $least)) -}}
{{- else -}}
{{- int $wanted -}}
{{- end -}}
{{- end }}

{{/* The sidecar: an init container that stays. Its start-up probe waits for nothing but itself. */}}
{{- define "idempotency-proxy.sidecar" -}}
name: idempotency-proxy
image: "{{ .Values.proxy.image.repository }}:{{ .Values.proxy.image.tag | default .Chart.AppVersion }}"
imagePullPolicy: {{ .Values.proxy.image.pullPolicy }}
restartPolicy: Always
args: ["--config", "/etc/idempotency-proxy/proxy.yaml"]
env:
  - name: STORE_URL
    {{- if .Values.store.existingSecret.name }}
    valueFrom:
      secretKeyRef:
        name: {{ .Values.store.existingSecret.name }}
        key: {{ .Values.store.existingSecret.key }}
    {{- else }}
    value: {{ .Values.store.url | quote }}
    {{- end }}
  {{- with .Values.proxy.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - name: proxy
    containerPort: {{ .Values.proxy.port }}
  - name: proxy-ops
    containerPort: {{ .Values.proxy.opsPort }}
startupProbe:
  httpGet: { path: /startupz, port: {{ .Values.proxy.opsPort }} }
  periodSeconds: 1
  failureThreshold: 60
livenessProbe:
  httpGet: { path: /livez, port: {{ .Values.proxy.opsPort }} }
  periodSeconds: 10
  timeoutSeconds: 3
  failureThreshold: 3
readinessProbe:
  httpGet: { path: /readyz, port: {{ .Values.proxy.opsPort }} }
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
  seccompProfile: { type: RuntimeDefault }
resources:
  {{- toYaml .Values.proxy.resources | nindent 2 }}
volumeMounts:
  # A directory, not a subPath: those never see an update.
  - name: idempotency-proxy-config
    mountPath: /etc/idempotency-proxy
    readOnly: true
{{- end }}

{{/* Belongs to the APP's container: it is stopped before its sidecars. */}}
{{- define "idempotency-proxy.appLifecycle" -}}
{{- if .Values.app.preStopSleepSeconds -}}
lifecycle:
  preStop:
    sleep: { seconds: {{ int .Values.app.preStopSleepSeconds }} }
{{- end }}
{{- end }}

{{- define "idempotency-proxy.volumes" -}}
- name: idempotency-proxy-config
  configMap:
    name: {{ include "idempotency-proxy.fullname" . }}
{{- end }}
