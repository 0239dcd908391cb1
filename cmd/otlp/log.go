// SPDX-License-Identifier: Apache-2.0

package otlp

import (
	"log/slog"
	"regexp"
	"strings"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel"
)

// LogTo logs what OpenTelemetry's SDK and exporters report: variables that they cannot read, and exports that failed.
// Without it they write to standard error, together with the values of variables. One of these is
// OTEL_EXPORTER_OTLP_HEADERS, which holds keys.
//
// It holds for the whole process, and its last call wins.
func LogTo(log *slog.Logger) {
	otel.SetLogger(logr.New(sink{log}))
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
		log.Warn("telemetry", "error", Clean(err.Error()))
	}))
}

var (
	urls = regexp.MustCompile(`[a-z]+://[^\s"]+`)
	// foreign begins what a collector has said, over HTTP and gRPC, and the values of variables that cannot be read
	foreign = regexp.MustCompile(`(?s)\s*(\(?body: |desc = |partial success: |missing value: |invalid URL escape ).*`)
)

// Clean returns the text of an exporter's error without URLs, and without what a collector has said: it may repeat a
// key.
func Clean(text string) string {
	return strings.TrimSuffix(foreign.ReplaceAllString(urls.ReplaceAllString(text, "URL"), ""), ":")
}

// sink logs the SDK's errors by their message alone: what comes with it are values of variables, and errors that quote
// them. Messages that are no errors are dropped.
type sink struct{ log *slog.Logger }

func (s sink) Init(logr.RuntimeInfo) {}

func (s sink) Enabled(int) bool { return false }

func (s sink) Info(int, string, ...any) {}

func (s sink) Error(_ error, message string, _ ...any) { s.log.Warn("telemetry", "error", message) }

func (s sink) WithValues(...any) logr.LogSink { return s }

func (s sink) WithName(string) logr.LogSink { return s }
