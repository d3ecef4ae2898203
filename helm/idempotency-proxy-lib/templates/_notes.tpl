{{/* For NOTES.txt: what is there, and what wiring is missing. */}}
{{- define "idempotency-proxy.notes" -}}
{{- if include "idempotency-proxy.enabled" . -}}
{{- $proxy := .Values.idempotencyProxy -}}
idempotency-proxy: every pod takes traffic on port {{ $proxy.port }} and serves /metrics on port {{ $proxy.opsPort }}.
Its records belong to the service {{ include "idempotency-proxy.service" . | replace "${POD_NAMESPACE}" .Release.Namespace }} (idempotencyProxy.service). Under another name they are not found, and retries of what was executed are executed again.
The end of a pod may take {{ include "idempotency-proxy.gracePeriod" . }} s.
{{- if not $proxy.existingConfigMap.name }}
{{- if not $proxy.config.routes }}

MISSING: idempotencyProxy.config.routes. POST and PATCH requests that carry an Idempotency-Key are protected under the defaults; no route demands a key.
{{- end }}
{{- else }}

The configuration is {{ $proxy.existingConfigMap.name }}/{{ $proxy.existingConfigMap.key }}, which this chart cannot see. It has to say:
  service: {{ include "idempotency-proxy.service" . | replace "${POD_NAMESPACE}" .Release.Namespace }}
  listen: 0.0.0.0:{{ $proxy.port }}
  ops: { listen: 0.0.0.0:{{ $proxy.opsPort }} }
  upstream.timeout: {{ $proxy.upstream.timeoutSeconds }}s
  drain: { delay: {{ include "idempotency-proxy.drainDelay" . }}s, timeout: {{ include "idempotency-proxy.drainTimeout" . }}s }
A change of it starts no new pods.
{{- end }}
{{- if not $proxy.image.digest }}

MISSING: idempotencyProxy.image.digest. A tag may be moved.
{{- end }}
{{- if not $proxy.admin.existingSecret.name }}

MISSING: idempotencyProxy.admin.existingSecret. Without a token nobody can look at records or resolve an unknown outcome through a proxy.
{{- end }}
{{- if $proxy.store.existingSecret.name }}

The store's URL is in Secret {{ $proxy.store.existingSecret.name }}, which this chart cannot see: it has to be a Redis that all replicas share.
{{- end }}
{{- if regexMatch "^redis(:|[+])" $proxy.store.url }}

The connection to the store is not encrypted: stored answers and record ids can be read on the way. rediss:// is.
{{- end }}
{{- if and $proxy.spool.enabled (hasKey $proxy.spool.volume "emptyDir") (not $proxy.spool.existingVolume) }}

The spool is an emptyDir: it outlives a restart of the container, not the pod.
{{- end }}
{{- if and (ne $proxy.mode "gateway") (lt (int $proxy.preStopSleepSeconds) 3) }}

WARNING: idempotencyProxy.preStopSleepSeconds is {{ $proxy.preStopSleepSeconds }}. The app stops while requests still arrive; those fail with 502.
{{- end }}
{{- if and (eq $proxy.mode "native") (eq $proxy.drain.hook "none") }}

WARNING: idempotencyProxy.drain.hook is none. Clients that keep their connections get 502 once the app of an ending pod has stopped.
{{- end }}
{{- end -}}
{{- end }}
