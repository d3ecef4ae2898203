{{- define "gateway.selectorLabels" -}}
app.kubernetes.io/name: idempotency-proxy
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gateway.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "idempotency-proxy.name" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end }}

{{- define "gateway.embedded" -}}
{{- if hasPrefix "sqlite:" .Values.idempotencyProxy.store.url -}}
true
{{- end -}}
{{- end }}
