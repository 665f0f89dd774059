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

{{/* A value as TOML: JSON, but for maps, which are inline tables. */}}
{{- define "semmoe.toml" -}}
{{- $parts := list }}
{{- if kindIs "map" . }}
{{- range $key, $value := . }}{{ $parts = append $parts (printf "%s = %s" (toJson $key) (include "semmoe.toml" $value)) }}{{ end -}}
{ {{ join ", " $parts }} }
{{- else if kindIs "slice" . }}
{{- range . }}{{ $parts = append $parts (include "semmoe.toml" .) }}{{ end -}}
[{{ join ", " $parts }}]
{{- else }}{{ toJson . }}{{ end }}
{{- end }}

{{/* Lines of a map, less what is empty. */}}
{{- define "semmoe.keys" -}}
{{- range $key, $value := . }}{{ if not (or (kindIs "invalid" $value) (eq (toString $value) "")) }}
{{ $key }} = {{ include "semmoe.toml" $value }}
{{- end }}{{ end }}
{{- end }}

{{/* The gateway's configuration: the keys of the values have the names of docs/configuration.md, and pass as they are. */}}
{{- define "semmoe.config" -}}
[server]
listen = "0.0.0.0:8080"
metrics = "0.0.0.0:{{ .Values.metricsPort }}"
# The default is loopback: `kubectl port-forward POD 8081` reaches it.
{{- include "semmoe.keys" (merge (deepCopy .Values.server) (dict "admin" "127.0.0.1:8081")) }}

{{- range $model := .Values.models }}

[[models]]
{{- include "semmoe.keys" (merge (omit $model "engines") (dict "policy" "least_load")) }}
{{- range $model.engines }}
{{- if or .service .dns .srv }}

[[models.discovery]]
{{- include "semmoe.keys" (omit . "service") }}
{{- with .service }}

[models.discovery.kubernetes]
{{- include "semmoe.keys" (dict "namespace" (.namespace | default $.Release.Namespace) "service" .name "port" .port) }}
{{- end }}
{{- else }}

[[models.backends]]
{{- include "semmoe.keys" . }}
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
