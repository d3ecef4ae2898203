{{/* The rules of files/rules.yaml with what the values say about single alerts. */}}
{{- define "observability.rules" -}}
{{- $values := .Values.prometheusRule -}}
{{- $known := list -}}
{{- $groups := list -}}
{{- range $group := (.Files.Get "files/rules.yaml" | fromYaml).groups -}}
{{- $kept := list -}}
{{- range $rule := $group.rules -}}
{{- $known = append $known .alert -}}
{{- $change := get $values.alerts .alert | default dict -}}
{{- if hasKey $change "for" -}}
{{- $_ := set $rule "for" $change.for -}}
{{- end -}}
{{- if hasKey $change "severity" -}}
{{- $_ := set $rule.labels "severity" $change.severity -}}
{{- end -}}
{{- if hasKey $change "threshold" -}}
{{- $_ := set $rule "expr" (include "observability.threshold" (dict "rule" $rule "threshold" $change.threshold)) -}}
{{- end -}}
{{- $runbook := dig "annotations" "runbook_url" "" $rule -}}
{{- if and $runbook $values.runbookBaseUrl -}}
{{- $_ := set $rule.annotations "runbook_url" (printf "%s/%s" (trimSuffix "/" $values.runbookBaseUrl) (base $runbook)) -}}
{{- else if $runbook -}}
{{- $_ := unset $rule.annotations "runbook_url" -}}
{{- end -}}
{{- if ne (toString $change.enabled) "false" -}}
{{- $kept = append $kept $rule -}}
{{- end -}}
{{- end -}}
{{- if $kept -}}
{{- $groups = append $groups (set $group "rules" $kept) -}}
{{- end -}}
{{- end -}}
{{- range $name, $_ := $values.alerts -}}
{{- if not (has $name $known) -}}
{{- fail (printf "prometheusRule.alerts.%s: there is no such alert. There are %s." $name (join ", " (sortAlpha $known))) -}}
{{- end -}}
{{- end -}}
{{- dict "groups" $groups | toYaml -}}
{{- end }}

{{/* The rule's expression with another limit. A limit is the only number that follows a `>` at the end of the expression or before `* max by`; 0 is none. */}}
{{- define "observability.threshold" -}}
{{- $limit := "(?s)(> )([0-9.]+)(\\s*$|\\s+\\* max by)" -}}
{{- $found := regexFindAll $limit .rule.expr -1 -}}
{{- if or (ne (len $found) 1) (regexMatch "^> 0\\s*$" (first $found | default "")) -}}
{{- fail (printf "prometheusRule.alerts.%s.threshold: this alert has no limit to change; it has enabled, for and severity." .rule.alert) -}}
{{- end -}}
{{- regexReplaceAll $limit .rule.expr (printf "${1}%v${3}" .threshold) -}}
{{- end }}
