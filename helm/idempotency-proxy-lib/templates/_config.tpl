{{/* The proxy's configuration file: the chart's part laid over the user's, and that over what identifies callers. */}}
{{- define "idempotency-proxy.config" -}}
{{- $proxy := .Values.idempotencyProxy -}}
{{- $upstream := $proxy.upstream.url | default (printf "http://127.0.0.1:%d" (int $proxy.upstream.port)) -}}
{{- $admin := dict "listen" (printf "127.0.0.1:%d" (int $proxy.admin.port)) -}}
{{- if $proxy.admin.existingSecret.name -}}
{{- $_ := set $admin "tokenFile" "/etc/idempotency-proxy-admin/token" -}}
{{- end -}}
{{- $store := dict "url" "${STORE_URL}" -}}
{{- if $proxy.store.recordIdSecret.name -}}
{{- $_ := set $store "secretFile" "/etc/idempotency-proxy-record-ids/secret" -}}
{{- end -}}
{{- if $proxy.store.encryption.keys -}}
{{- $keys := list -}}
{{- range $proxy.store.encryption.keys -}}
{{- $keys = append $keys (dict "id" . "file" (printf "/etc/idempotency-proxy-encryption/%s" .)) -}}
{{- end -}}
{{- $_ := set $store "encryption" (dict "keys" $keys) -}}
{{- end -}}
{{- if $proxy.spool.enabled -}}
{{- $_ := set $store "spool" "/var/spool/idempotency-proxy/outcomes" -}}
{{- end -}}
{{- $listen := dict "address" (printf "0.0.0.0:%d" (int $proxy.port)) -}}
{{- if $proxy.tls.existingSecret -}}
{{- $tls := dict "cert" "/etc/idempotency-proxy-tls/tls.crt" "key" "/etc/idempotency-proxy-tls/tls.key" -}}
{{- with $proxy.tls.clientCaKey -}}
{{- $_ := set $tls "clientCa" (printf "/etc/idempotency-proxy-tls/%s" .) -}}
{{- end -}}
{{- $_ := set $listen "tls" $tls -}}
{{- else if $proxy.http2 -}}
{{- $_ := set $listen "http2" true -}}
{{- end -}}
{{- $to := dict "url" $upstream "timeout" (printf "%ds" (int $proxy.upstream.timeoutSeconds)) -}}
{{- if $proxy.upstream.http2 -}}
{{- $_ := set $to "http2" true -}}
{{- end -}}
{{- $own := dict
      "service" (include "idempotency-proxy.service" .)
      "listen" $listen
      "ops" (dict "listen" (printf "0.0.0.0:%d" (int $proxy.opsPort)))
      "admin" $admin
      "upstream" $to
      "store" $store
      "drain" (dict
        "delay" (printf "%ds" (include "idempotency-proxy.drainDelay" . | int))
        "timeout" (printf "%ds" (include "idempotency-proxy.drainTimeout" . | int))) -}}
{{- /* It listens where other machines can reach it: who the callers are has to be written. */ -}}
{{- $callers := dict "defaults" (dict "scope" (dict "caller" "header:authorization" "anonymous" "reject")) -}}
{{- mustMergeOverwrite $callers (deepCopy $proxy.config) $own | toYaml -}}
{{- end }}

{{- define "idempotency-proxy.configMapName" -}}
{{- .Values.idempotencyProxy.existingConfigMap.name | default (include "idempotency-proxy.name" .) -}}
{{- end }}

{{- define "idempotency-proxy.configMap" -}}
{{- if and (include "idempotency-proxy.enabled" .) (not .Values.idempotencyProxy.existingConfigMap.name) -}}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ include "idempotency-proxy.name" . }}
  labels:
    {{- include "idempotency-proxy.labels" . | nindent 4 }}
data:
  proxy.yaml: |
    {{- include "idempotency-proxy.config" . | nindent 4 }}
{{- end -}}
{{- end }}

{{/* Annotations of the pod: a changed configuration starts new pods. */}}
{{- define "idempotency-proxy.podAnnotations" -}}
{{- if and (include "idempotency-proxy.enabled" .) .Values.idempotencyProxy.rolloutOnChange (not .Values.idempotencyProxy.existingConfigMap.name) -}}
checksum/idempotency-proxy: {{ include "idempotency-proxy.config" . | sha256sum }}
{{- end -}}
{{- end }}
