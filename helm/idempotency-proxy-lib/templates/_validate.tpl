{{/* What Kubernetes would accept and what would lose records or requests. */}}
{{- define "idempotency-proxy.validate" -}}
{{- $proxy := .Values.idempotencyProxy -}}
{{- if not $proxy.image.repository -}}
{{- fail (printf "Set idempotencyProxy.image.repository: no image is published yet, so build it from the checkout and push it to a registry that your cluster pulls from. docker build -t REGISTRY/idempotency-proxy:%s . && docker push REGISTRY/idempotency-proxy:%s" .Subcharts.idempotencyProxy.Chart.AppVersion .Subcharts.idempotencyProxy.Chart.AppVersion) -}}
{{- end -}}
{{- include "idempotency-proxy.validateStore" . -}}
{{- include "idempotency-proxy.validateEnd" . -}}
{{- include "idempotency-proxy.validateConfig" . -}}
{{- include "idempotency-proxy.validatePorts" . -}}
{{- $service := include "idempotency-proxy.service" . | replace "${POD_NAMESPACE}" .Release.Namespace -}}
{{- if gt (len $service) 64 -}}
{{- fail (printf "Set idempotencyProxy.service: its default, %s, has more than 64 characters." $service) -}}
{{- end -}}
{{- if and (eq $proxy.mode "gateway") (not $proxy.upstream.url) (not $proxy.existingConfigMap.name) -}}
{{- fail "Set idempotencyProxy.upstream.url: the Service behind the gateway, such as http://payments.shop.svc.cluster.local" -}}
{{- end -}}
{{- if and (ne $proxy.mode "gateway") $proxy.upstream.url -}}
{{- fail "idempotencyProxy.upstream.url is for mode gateway: a sidecar's upstream is the app in its pod, at upstream.port." -}}
{{- end -}}
{{- if and $proxy.tls.clientCaKey (not $proxy.tls.existingSecret) -}}
{{- fail "idempotencyProxy.tls.clientCaKey is an entry of tls.existingSecret, which is not set." -}}
{{- end -}}
{{- if and $proxy.ca.existingConfigMap $proxy.ca.existingSecret -}}
{{- fail "Set idempotencyProxy.ca.existingConfigMap or ca.existingSecret, not both." -}}
{{- end -}}
{{- end }}

{{- define "idempotency-proxy.validatePorts" -}}
{{- $proxy := .Values.idempotencyProxy -}}
{{- $ports := dict "port" $proxy.port "opsPort" $proxy.opsPort "admin.port" $proxy.admin.port -}}
{{- if ne $proxy.mode "gateway" -}}
{{- if not $proxy.upstream.port -}}
{{- fail "Set idempotencyProxy.upstream.port: where the app listens in its pod, the containerPort of its container." -}}
{{- end -}}
{{- $_ := set $ports "upstream.port" $proxy.upstream.port -}}
{{- end -}}
{{- $taken := dict -}}
{{- range $name, $port := $ports -}}
{{- $number := toString (int $port) -}}
{{- if hasKey $taken $number -}}
{{- fail (printf "idempotencyProxy.%s and idempotencyProxy.%s are both %s: the containers of a pod share one address." (get $taken $number) $name $number) -}}
{{- end -}}
{{- $_ := set $taken $number $name -}}
{{- end -}}
{{- end }}

{{- define "idempotency-proxy.validateStore" -}}
{{- $proxy := .Values.idempotencyProxy -}}
{{- $store := $proxy.store -}}
{{- $replicas := include "idempotency-proxy.maxReplicas" . | int -}}
{{- if and (not $store.url) (not $store.existingSecret.name) (not $proxy.existingConfigMap.name) -}}
{{- fail "Set idempotencyProxy.store.url (such as redis://redis:6379/0) or store.existingSecret.name: the replicas share their records there." -}}
{{- end -}}
{{- if and $store.url $store.existingSecret.name -}}
{{- fail "Set idempotencyProxy.store.url or store.existingSecret.name, not both." -}}
{{- end -}}
{{- if or (contains "@" $store.url) (contains "?" $store.url) -}}
{{- fail "idempotencyProxy.store.url has credentials, which everybody who may read the release would see. Put it into a Secret: store.existingSecret." -}}
{{- end -}}
{{- if hasPrefix "memory:" $store.url -}}
{{- fail "idempotencyProxy.store.url \"memory:\" forgets at every restart what was executed, and it would then be executed again. Use a Redis." -}}
{{- end -}}
{{- if hasPrefix "sqlite:" $store.url -}}
{{- if ne $replicas 1 -}}
{{- fail (printf "idempotencyProxy.store.url %q is embedded: replicas cannot share it, and each would execute the same key. Use a Redis, or one replica (found %s)." $store.url (ternary "no number: set idempotencyProxy.maxReplicas" (toString $replicas) (eq $replicas 0))) -}}
{{- end -}}
{{- if or (not $store.existingClaim) (not (hasPrefix "sqlite:/data/" $store.url)) -}}
{{- fail (printf "idempotencyProxy.store.url %q would be lost with its pod, and what it recorded would then be executed again. Set store.existingClaim, which is mounted at /data, and sqlite:/data/<name>.db." $store.url) -}}
{{- end -}}
{{- else if $store.existingClaim -}}
{{- fail "idempotencyProxy.store.existingClaim is for sqlite:/data/<name>.db alone." -}}
{{- end -}}
{{- if and $proxy.spool.enabled (hasKey $proxy.spool.volume "persistentVolumeClaim") (not $proxy.spool.existingVolume) (ne $replicas 1) -}}
{{- fail "idempotencyProxy.spool.volume is one claim for several pods: a spool is of one process alone. Use emptyDir, ephemeral, or a StatefulSet's claim template as spool.existingVolume." -}}
{{- end -}}
{{- end }}

{{- define "idempotency-proxy.validateEnd" -}}
{{- $proxy := .Values.idempotencyProxy -}}
{{- $delay := include "idempotency-proxy.drainDelay" . | int -}}
{{- if and (ne $proxy.mode "gateway") (gt $delay 0) (ge $delay (int $proxy.preStopSleepSeconds)) -}}
{{- fail (printf "idempotencyProxy.drain.delaySeconds %d: the app would stop after %d s, before the proxy does (preStopSleepSeconds)." $delay (int $proxy.preStopSleepSeconds)) -}}
{{- end -}}
{{- if lt (include "idempotency-proxy.drainTimeout" . | int) (int $proxy.upstream.timeoutSeconds) -}}
{{- fail (printf "idempotencyProxy.drain.timeoutSeconds cuts off calls that may take upstream.timeoutSeconds, %d." (int $proxy.upstream.timeoutSeconds)) -}}
{{- end -}}
{{- if and (eq $proxy.drain.hook "drain") (not $proxy.admin.existingSecret.name) -}}
{{- fail "idempotencyProxy.drain.hook \"drain\" asks the admin API: it needs its token, admin.existingSecret." -}}
{{- end -}}
{{- if and (eq $proxy.drain.hook "drain") (ne $proxy.mode "native") -}}
{{- fail "idempotencyProxy.drain.hook \"drain\" is for mode native: elsewhere SIGTERM comes first, and drain.delaySeconds follows." -}}
{{- end -}}
{{- end }}

{{- define "idempotency-proxy.validateConfig" -}}
{{- $proxy := .Values.idempotencyProxy -}}
{{- if and $proxy.existingConfigMap.name $proxy.config -}}
{{- fail "Set idempotencyProxy.config or existingConfigMap, not both." -}}
{{- end -}}
{{- if ne (empty $proxy.store.encryption.existingSecret) (empty $proxy.store.encryption.keys) -}}
{{- fail "idempotencyProxy.store.encryption: set both existingSecret and keys (the names of its entries), or neither." -}}
{{- end -}}
{{- range $path, $instead := dict
      "service" "service"
      "listen" "port"
      "ops" "opsPort"
      "admin.listen" "admin.port"
      "admin.tokenFile" "admin.existingSecret"
      "upstream.url" "upstream"
      "upstream.timeout" "upstream.timeoutSeconds"
      "store.url" "store"
      "store.spool" "spool"
      "store.secretFile" "store.recordIdSecret"
      "store.encryption" "store.encryption"
      "drain" "drain" -}}
{{- $parts := splitList "." $path -}}
{{- $section := index $proxy.config (first $parts) -}}
{{- if or (and (eq (len $parts) 1) (hasKey $proxy.config $path)) (and (eq (len $parts) 2) (kindIs "map" $section) (hasKey (default dict $section) (last $parts))) -}}
{{- fail (printf "idempotencyProxy.config.%s is set by the chart: use idempotencyProxy.%s." $path $instead) -}}
{{- end -}}
{{- end -}}
{{- end }}
