{{- define "idempotency-proxy.image" -}}
{{- $image := .Values.idempotencyProxy.image -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository ($image.tag | default .Subcharts.idempotencyProxy.Chart.AppVersion) -}}
{{- end -}}
{{- end }}

{{/* One item of initContainers (mode native) or containers. Its start-up probe waits for nothing but itself. */}}
{{- define "idempotency-proxy.container" -}}
{{- if include "idempotency-proxy.enabled" . -}}
{{- $proxy := .Values.idempotencyProxy -}}
- name: idempotency-proxy
  image: {{ include "idempotency-proxy.image" . | quote }}
  imagePullPolicy: {{ $proxy.image.pullPolicy }}
  {{- if eq $proxy.mode "native" }}
  restartPolicy: Always
  {{- end }}
  args: ["--config", {{ printf "/etc/idempotency-proxy/%s" $proxy.existingConfigMap.key | quote }}]
  {{- with include "idempotency-proxy.env" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  ports:
    - name: idempotency
      containerPort: {{ $proxy.port }}
      protocol: TCP
    # The PodMonitor finds it by this name.
    - name: idempotency-ops
      containerPort: {{ $proxy.opsPort }}
      protocol: TCP
  startupProbe:
    httpGet: { path: /startupz, port: {{ $proxy.opsPort }} }
    periodSeconds: 1
    timeoutSeconds: 3
    failureThreshold: 60
  livenessProbe:
    httpGet: { path: /livez, port: {{ $proxy.opsPort }} }
    periodSeconds: 10
    timeoutSeconds: 3
    failureThreshold: 3
  readinessProbe:
    httpGet: { path: /readyz, port: {{ $proxy.opsPort }} }
    periodSeconds: 5
    timeoutSeconds: 3
    failureThreshold: 2
  {{- with include "idempotency-proxy.hook" . }}
  {{- . | nindent 2 }}
  {{- end }}
  # What the proxy said last, where it could not start.
  terminationMessagePolicy: FallbackToLogsOnError
  securityContext:
    runAsNonRoot: true
    runAsUser: 65532
    runAsGroup: 65532
    allowPrivilegeEscalation: false
    privileged: false
    readOnlyRootFilesystem: true
    capabilities: { drop: [ALL] }
    seccompProfile: { type: RuntimeDefault }
  resources:
    {{- toYaml $proxy.resources | nindent 4 }}
  volumeMounts:
    {{- include "idempotency-proxy.volumeMounts" . | nindent 4 }}
{{- end -}}
{{- end }}

{{- define "idempotency-proxy.env" -}}
{{- $proxy := .Values.idempotencyProxy -}}
{{- $store := $proxy.store -}}
{{- $namespaced := not (or $proxy.service $proxy.existingConfigMap.name) -}}
{{- if or $namespaced $store.url $store.existingSecret.name $proxy.ca.existingConfigMap $proxy.ca.existingSecret $proxy.env -}}
env:
  {{- if $store.existingSecret.name }}
  - name: STORE_URL
    valueFrom:
      secretKeyRef:
        name: {{ $store.existingSecret.name }}
        key: {{ $store.existingSecret.key }}
  {{- else if $store.url }}
  - name: STORE_URL
    value: {{ $store.url | quote }}
  {{- end }}
  {{- if or $proxy.ca.existingConfigMap $proxy.ca.existingSecret }}
  # Node trusts these beside the public ones.
  - name: NODE_EXTRA_CA_CERTS
    value: {{ printf "/etc/idempotency-proxy-ca/%s" $proxy.ca.key }}
  {{- end }}
  {{- if $namespaced }}
  - name: POD_NAMESPACE
    valueFrom:
      fieldRef: { fieldPath: metadata.namespace }
  {{- end }}
  {{- with $proxy.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- with $proxy.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/*
A native sidecar gets SIGTERM after its app has ended. It hears of the end while the app still serves, so that clients'
connections go elsewhere. Where a kubelet runs this hook only then, too, it changes nothing.
*/}}
{{- define "idempotency-proxy.hook" -}}
{{- $proxy := .Values.idempotencyProxy -}}
{{- if and (eq $proxy.mode "native") (eq $proxy.drain.hook "signal") -}}
lifecycle:
  preStop:
    exec: { command: ["node", "-e", "process.kill(1, 'SIGTERM')"] }
{{- else if and (eq $proxy.mode "native") (eq $proxy.drain.hook "drain") -}}
lifecycle:
  preStop:
    exec:
      command: ["idempotency-proxy", "drain", "--admin", {{ printf "http://127.0.0.1:%d" (int $proxy.admin.port) | quote }}, "--token-file", "/etc/idempotency-proxy-admin/token", "--by", "preStop"]
{{- end -}}
{{- end }}
