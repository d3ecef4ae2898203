{{/*
The whole wiring of a sidecar, in a template file of its own:

  {{ include "idempotency-proxy.sidecar" (list . "_deployment.yaml" "_service.yaml") }}

The other arguments are templates of the same chart, renamed to begin with an underscore, so that Helm does not render them a second time.
What they render is read as YAML, the proxy is put into the pods, the Services that select these pods send their traffic to it, and all
of it is written again, with the proxy's ConfigMap.
*/}}
{{- define "idempotency-proxy.sidecar" -}}
{{- if or (not (kindIs "slice" .)) (lt (len .) 2) -}}
{{- fail "Name the templates that the proxy is put into: {{ include \"idempotency-proxy.sidecar\" (list . \"_deployment.yaml\" \"_service.yaml\") }}" -}}
{{- end -}}
{{- $root := first . -}}
{{- $enabled := include "idempotency-proxy.enabled" $root -}}
{{- $objects := list -}}
{{- range $file := rest . -}}
{{- if not (hasPrefix "_" (base $file)) -}}
{{- fail (printf "Rename templates/%s to templates/%s: under its present name Helm renders it a second time, without the proxy." $file (printf "_%s" (base $file))) -}}
{{- end -}}
{{- range regexSplit "(?m)^---.*$" (include (printf "%s/%s" $root.Template.BasePath $file) $root) -1 -}}
{{- $object := fromYaml . -}}
{{- if hasKey $object "Error" -}}
{{- fail (printf "What templates/%s renders is not YAML: %s" $file $object.Error) -}}
{{- end -}}
{{- if $object -}}
{{- $objects = append $objects $object -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $enabled -}}
{{- $workload := include "idempotency-proxy.workload" (dict "objects" $objects "files" (rest .)) | int | index $objects -}}
{{- include "idempotency-proxy.intoPod" (dict "root" $root "workload" $workload) -}}
{{- include "idempotency-proxy.intoServices" (dict "root" $root "workload" $workload "objects" $objects "files" (rest .)) -}}
{{- end -}}
{{- range $objects }}
---
{{ toYaml . }}
{{- end }}
---
{{ include "idempotency-proxy.configMap" $root }}
{{- end }}

{{/* The index of the one object that makes pods. */}}
{{- define "idempotency-proxy.workload" -}}
{{- $found := list -}}
{{- range $n, $object := .objects -}}
{{- if and (ne $object.kind "Job") (dig "spec" "template" "spec" "containers" list $object) -}}
{{- $found = append $found $n -}}
{{- end -}}
{{- end -}}
{{- if ne (len $found) 1 -}}
{{- fail (printf "%s: found %d workloads (objects with spec.template.spec.containers). The proxy is put into one: name its template, and those of its Services." (join ", " .files) (len $found)) -}}
{{- end -}}
{{- first $found -}}
{{- end }}

{{/* Changes the workload: container, volumes, annotations, the app's pause, the grace period. */}}
{{- define "idempotency-proxy.intoPod" -}}
{{- $root := .root -}}
{{- $proxy := $root.Values.idempotencyProxy -}}
{{- $called := printf "%s %s" .workload.kind .workload.metadata.name -}}
{{- $template := .workload.spec.template -}}
{{- $pod := $template.spec -}}
{{- $sidecars := list -}}
{{- range $pod.initContainers -}}
{{- if eq (toString .restartPolicy) "Always" -}}
{{- $sidecars = append $sidecars . -}}
{{- end -}}
{{- end -}}
{{- range concat $pod.containers $sidecars -}}
{{- $container := . -}}
{{- range .ports -}}
{{- $port := int .containerPort -}}
{{- range $name, $own := dict "port" $proxy.port "opsPort" $proxy.opsPort "admin.port" $proxy.admin.port -}}
{{- if eq $port (int $own) -}}
{{- fail (printf "%s: container %s has port %d, and so has idempotencyProxy.%s. The containers of a pod share one address: give the proxy another port." $called $container.name $port $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq $proxy.mode "native") (eq $proxy.drain.hook "signal") $pod.shareProcessNamespace -}}
{{- fail (printf "%s has shareProcessNamespace: process 1 is not the proxy, and idempotencyProxy.drain.hook \"signal\" would not reach it. Use \"drain\" or \"none\"." $called) -}}
{{- end -}}
{{- include "idempotency-proxy.pauseApp" (dict "proxy" $proxy "called" $called "containers" $pod.containers) -}}

{{- $items := ternary "initContainers" "containers" (eq $proxy.mode "native") -}}
{{- $own := include "idempotency-proxy.container" $root | fromYamlArray -}}
{{- range concat $pod.containers ($pod.initContainers | default list) -}}
{{- if eq .name (first $own).name -}}
{{- fail (printf "%s has a container %s already." $called .name) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $pod $items (concat (get $pod $items | default list) $own) -}}

{{- $volumes := $pod.volumes | default list -}}
{{- range $volume := include "idempotency-proxy.volumes" $root | fromYamlArray -}}
{{- range $pod.volumes -}}
{{- if eq .name $volume.name -}}
{{- fail (printf "%s has a volume %s already, and the proxy brings one of that name: rename yours (or take it out of idempotencyProxy.extraVolumes)." $called .name) -}}
{{- end -}}
{{- end -}}
{{- $volumes = append $volumes $volume -}}
{{- end -}}
{{- $_ := set $pod "volumes" $volumes -}}

{{- $grace := include "idempotency-proxy.gracePeriod" $root | int -}}
{{- $_ := set $pod "terminationGracePeriodSeconds" (max $grace (int $pod.terminationGracePeriodSeconds)) -}}
{{- $annotations := include "idempotency-proxy.podAnnotations" $root | fromYaml -}}
{{- if $annotations -}}
{{- $metadata := $template.metadata | default dict -}}
{{- $_ := set $metadata "annotations" (mustMerge $annotations ($metadata.annotations | default dict)) -}}
{{- $_ := set $template "metadata" $metadata -}}
{{- end -}}
{{- end }}

{{/* The app, which is what listens on upstream.port, serves on while its pod leaves the load balancers. */}}
{{- define "idempotency-proxy.pauseApp" -}}
{{- $proxy := .proxy -}}
{{- $port := int $proxy.upstream.port -}}
{{- $app := dict -}}
{{- $found := list -}}
{{- range $container := .containers -}}
{{- range .ports -}}
{{- $found = append $found (printf "%s %d" $container.name (int .containerPort)) -}}
{{- if eq (int .containerPort) $port -}}
{{- $app = $container -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (not $app) (not $found) (eq (len .containers) 1) -}}
{{- $app = first .containers -}}
{{- end -}}
{{- if not $app -}}
{{- fail (printf "idempotencyProxy.upstream.port is %d, and no container of %s has that containerPort: found %s." $port .called (join ", " $found | default "none")) -}}
{{- end -}}
{{- if and $proxy.preStopSleepSeconds (eq $proxy.appPreStop "add") -}}
{{- $lifecycle := $app.lifecycle | default dict -}}
{{- if $lifecycle.preStop -}}
{{- fail (printf "Container %s of %s has a preStop hook of its own. Let it wait %d s (idempotencyProxy.preStopSleepSeconds) before it stops anything, and set idempotencyProxy.appPreStop to \"keep\"." $app.name .called (int $proxy.preStopSleepSeconds)) -}}
{{- end -}}
{{- $_ := set $lifecycle "preStop" (dict "sleep" (dict "seconds" (int $proxy.preStopSleepSeconds))) -}}
{{- $_ := set $app "lifecycle" $lifecycle -}}
{{- end -}}
{{- end }}

{{/* Every Service of these pods: what went to the app's port goes to the proxy's. */}}
{{- define "idempotency-proxy.intoServices" -}}
{{- $proxy := .root.Values.idempotencyProxy -}}
{{- $labels := dig "metadata" "labels" dict .workload.spec.template -}}
{{- $numbers := dict -}}
{{- range .workload.spec.template.spec.containers -}}
{{- range .ports -}}
{{- if .name -}}
{{- $_ := set $numbers .name (int .containerPort) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $sent := 0 -}}
{{- range .objects -}}
{{- $selector := dig "spec" "selector" dict . -}}
{{- $matches := and (eq .kind "Service") $selector -}}
{{- if $matches -}}
{{- range $name, $value := $selector -}}
{{- if ne (toString (get $labels $name)) (toString $value) -}}
{{- $matches = false -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $matches -}}
{{- $headless := eq (toString .spec.clusterIP) "None" -}}
{{- range .spec.ports -}}
{{- $target := .targetPort | default .port -}}
{{- $number := ternary (get $numbers (toString $target) | int) (int $target) (kindIs "string" $target) -}}
{{- if eq $number (int $proxy.upstream.port) -}}
{{- $_ := set . "targetPort" (int $proxy.port) -}}
{{- $sent = add $sent (ternary 0 1 $headless) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if not $sent -}}
{{- fail (printf "No Service in %s sends traffic to port %d of the pods of %s %s: it would go around the proxy. Name the template with that Service, too." (join ", " .files) (int $proxy.upstream.port) .workload.kind .workload.metadata.name) -}}
{{- end -}}
{{- end }}
