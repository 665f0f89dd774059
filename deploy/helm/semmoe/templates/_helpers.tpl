{{- define "semmoe.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 63 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "semmoe.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "semmoe.labels" -}}
{{ include "semmoe.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "semmoe.account" -}}
{{- if .Values.serviceAccount.name }}{{ .Values.serviceAccount.name }}{{ else if .Values.serviceAccount.create }}{{ include "semmoe.name" . }}{{ else }}default{{ end }}
{{- end }}

{{/* The gateway's configuration. JSON strings are TOML strings. */}}
{{- define "semmoe.config" -}}
[server]
listen = "0.0.0.0:8080"
metrics = "0.0.0.0:{{ .Values.metricsPort }}"
# Loopback: `kubectl port-forward POD 8081` reaches it.
admin = "127.0.0.1:8081"

{{- range $model := .Values.models }}

[[models]]
name = {{ $model.name | toJson }}
policy = {{ $model.policy | default "least_load" | toJson }}
{{- with $model.tokenizer }}
tokenizer = {{ toJson . }}
{{- end }}
{{- with $model.aliases }}
aliases = {{ toJson . }}
{{- end }}
{{- range $model.engines }}
{{- if not .service }}

[[models.backends]]
name = {{ .name | toJson }}
engine = {{ .engine | toJson }}
url = {{ .url | toJson }}
{{- with .tables }}
tables = {{ toJson . }}
{{- end }}
{{- end }}
{{- end }}
{{- range $model.engines }}
{{- if .service }}

[[models.discovery]]
name = {{ .name | toJson }}
engine = {{ .engine | toJson }}
{{- with .tables }}
tables = {{ toJson . }}
{{- end }}

[models.discovery.kubernetes]
namespace = {{ .service.namespace | default $.Release.Namespace | toJson }}
service = {{ .service.name | toJson }}
{{- with .service.port }}
port = {{ toJson . }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{ .Values.extraConfig }}
{{- end }}

{{/* The namespaces whose services are watched, each once. */}}
{{- define "semmoe.watched" -}}
{{- $found := list }}
{{- range .Values.models }}{{ range .engines }}{{ if .service }}{{ $found = append $found (.service.namespace | default $.Release.Namespace) }}{{ end }}{{ end }}{{ end }}
{{- $found | uniq | toJson }}
{{- end }}
