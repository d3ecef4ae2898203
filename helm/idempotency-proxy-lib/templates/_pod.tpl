{{/* Items of the pod's volumes. */}}
{{- define "idempotency-proxy.volumes" -}}
{{- if include "idempotency-proxy.enabled" . -}}
{{- $proxy := .Values.idempotencyProxy -}}
- name: idempotency-proxy-config
  configMap:
    name: {{ include "idempotency-proxy.configMapName" . }}
{{- with $proxy.admin.existingSecret }}
{{- if .name }}
- name: idempotency-proxy-admin
  secret:
    secretName: {{ .name }}
    items: [{ key: {{ .key }}, path: token }]
{{- end }}
{{- end }}
{{- with $proxy.store.recordIdSecret }}
{{- if .name }}
- name: idempotency-proxy-record-ids
  secret:
    secretName: {{ .name }}
    items: [{ key: {{ .key }}, path: secret }]
{{- end }}
{{- end }}
{{- with $proxy.store.encryption }}
{{- if .keys }}
- name: idempotency-proxy-encryption
  secret:
    secretName: {{ .existingSecret }}
    items:
      {{- range .keys }}
      - { key: {{ . }}, path: {{ . }} }
      {{- end }}
{{- end }}
{{- end }}
{{- if $proxy.tls.existingSecret }}
- name: idempotency-proxy-tls
  secret:
    secretName: {{ $proxy.tls.existingSecret }}
{{- end }}
{{- if $proxy.ca.existingConfigMap }}
- name: idempotency-proxy-ca
  configMap:
    name: {{ $proxy.ca.existingConfigMap }}
    items: [{ key: {{ $proxy.ca.key }}, path: {{ $proxy.ca.key }} }]
{{- else if $proxy.ca.existingSecret }}
- name: idempotency-proxy-ca
  secret:
    secretName: {{ $proxy.ca.existingSecret }}
    items: [{ key: {{ $proxy.ca.key }}, path: {{ $proxy.ca.key }} }]
{{- end }}
{{- if $proxy.store.existingClaim }}
- name: idempotency-proxy-data
  persistentVolumeClaim:
    claimName: {{ $proxy.store.existingClaim }}
{{- end }}
{{- if and $proxy.spool.enabled (not $proxy.spool.existingVolume) }}
- name: idempotency-proxy-spool
  {{- toYaml $proxy.spool.volume | nindent 2 }}
{{- end }}
{{- with $proxy.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
{{- end }}

{{- define "idempotency-proxy.volumeMounts" -}}
{{- $proxy := .Values.idempotencyProxy -}}
# Directories, no subPath: those never see an update.
- name: idempotency-proxy-config
  mountPath: /etc/idempotency-proxy
  readOnly: true
{{- if $proxy.admin.existingSecret.name }}
- name: idempotency-proxy-admin
  mountPath: /etc/idempotency-proxy-admin
  readOnly: true
{{- end }}
{{- if $proxy.store.recordIdSecret.name }}
- name: idempotency-proxy-record-ids
  mountPath: /etc/idempotency-proxy-record-ids
  readOnly: true
{{- end }}
{{- if $proxy.store.encryption.keys }}
- name: idempotency-proxy-encryption
  mountPath: /etc/idempotency-proxy-encryption
  readOnly: true
{{- end }}
{{- if $proxy.tls.existingSecret }}
- name: idempotency-proxy-tls
  mountPath: /etc/idempotency-proxy-tls
  readOnly: true
{{- end }}
{{- if or $proxy.ca.existingConfigMap $proxy.ca.existingSecret }}
- name: idempotency-proxy-ca
  mountPath: /etc/idempotency-proxy-ca
  readOnly: true
{{- end }}
{{- if $proxy.store.existingClaim }}
- name: idempotency-proxy-data
  mountPath: /data
{{- end }}
{{- if $proxy.spool.enabled }}
- name: {{ $proxy.spool.existingVolume | default "idempotency-proxy-spool" }}
  mountPath: /var/spool/idempotency-proxy
{{- end }}
{{- with $proxy.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}
