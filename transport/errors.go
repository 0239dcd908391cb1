// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"syscall"
)

// ErrClosed is what a request to a closed [Transport] fails with.
var ErrClosed = errors.New("transport: closed")

// Sent says how far a failed request got.
type Sent uint8

// How far a failed request got.
const (
	// SentNothing: provably no byte of the request was handed to a connection. Sending it again cannot make an engine
	// do its work twice.
	SentNothing Sent = iota
	// SentMaybe: some of the request, or all of it, was written, and no response came. The engine may be working on it.
	SentMaybe
	// SentAnswered: the head of a response was read, and reading its body failed.
	SentAnswered
)

// String returns "not sent", "maybe sent" or "answered".
func (s Sent) String() string {
	switch s {
	case SentNothing:
		return "not sent"
	case SentMaybe:
		return "maybe sent"
	default:
		return "answered"
	}
}

// Kind says what went wrong, for metrics and for choosing a status code.
type Kind uint8

// What went wrong.
const (
	// KindOther is anything not listed here, a request that cannot be sent among them.
	KindOther Kind = iota
	// KindRefused: the engine's host refused the connection or cannot be reached.
	KindRefused
	// KindDNS: the engine's name was not resolved.
	KindDNS
	// KindTLS: the handshake failed, on either side.
	KindTLS
	// KindTimeout: the request's context ended by its deadline, or its cause was a timeout.
	KindTimeout
	// KindConnectTimeout: TCP and TLS took longer than Options.ConnectTimeout.
	KindConnectTimeout
	// KindReset: the connection was reset.
	KindReset
	// KindEOF: the engine closed the connection before its response was complete.
	KindEOF
	// KindCanceled: the request's context was cancelled.
	KindCanceled
	// KindProtocol: what the engine sent is not HTTP, its head is too long, or it is the response to another request.
	KindProtocol
)

var kindNames = [...]string{
	KindOther:          "other",
	KindRefused:        "refused",
	KindDNS:            "dns",
	KindTLS:            "tls",
	KindTimeout:        "timeout",
	KindConnectTimeout: "connect_timeout",
	KindReset:          "reset",
	KindEOF:            "eof",
	KindCanceled:       "canceled",
	KindProtocol:       "protocol",
}

// String returns a lower-case word that suits a metric's label.
func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return kindNames[KindOther]
}

// Error is the only type of error that [Transport.RoundTrip], the bodies of its responses and [Retrier.Do] return. Its
// text names neither URL nor address; the error it wraps may, and so belongs in no response to a client.
//
// errors.Is(err, context.Canceled) holds for KindCanceled and errors.Is(err, context.DeadlineExceeded) for
// KindTimeout, even where the context ended with another cause. That cause is found by errors.Is and errors.As too.
type Error struct {
	Sent Sent
	Kind Kind
	// Reused tells that the request was given a connection that had served another before.
	Reused bool
	// Err is the underlying error, with addresses in its text.
	Err error

	// final marks failures that a second try on the same engine repeats.
	final bool
}

// Error returns a text without URL, address or anything of the request.
func (e *Error) Error() string {
	text := "transport: " + e.Kind.String() + " (" + e.Sent.String() + ")"
	if why := reason(e.Err); why != "" {
		text += ": " + why
	}
	return text
}

// reason says what is wrong with a certificate, without the names in it, or with a response; "" for other faults.
func reason(err error) string {
	var invalid x509.CertificateInvalidError
	switch {
	case errors.Is(err, errMisplaced):
		return "the response is to another request"
	case errors.As(err, new(x509.UnknownAuthorityError)):
		return "the engine's certificate is signed by an unknown authority"
	case errors.As(err, new(x509.HostnameError)):
		return "the engine's certificate has another name"
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return "the engine's certificate has expired or is not valid yet"
	case isAlert(err):
		op, _ := errors.AsType[*net.OpError](err)
		return "the engine says " + op.Err.Error() // one of the texts of package tls
	}
	return ""
}

// Unwrap returns the underlying error.
func (e *Error) Unwrap() error { return e.Err }

// Is reports a context's end under the context package's own sentinels.
func (e *Error) Is(target error) bool {
	switch target {
	case context.Canceled:
		return e.Kind == KindCanceled
	case context.DeadlineExceeded:
		return e.Kind == KindTimeout
	}
	return false
}

// Timeout reports whether a limit of time was the reason.
func (e *Error) Timeout() bool { return e.Kind == KindTimeout || e.Kind == KindConnectTimeout }

// LogValue keeps addresses out of logs.
func (e *Error) LogValue() slog.Value {
	group := []slog.Attr{
		slog.String("kind", e.Kind.String()), slog.String("sent", e.Sent.String()), slog.Bool("reused", e.Reused),
	}
	if why := reason(e.Err); why != "" {
		group = append(group, slog.String("why", why))
	}
	return slog.GroupValue(group...)
}

// Classify tells how far the request that failed with err got. It is exact for errors of this package, wrapped or not.
// Of foreign errors only failures to dial and to resolve a name count as SentNothing; all others, and nil, count as
// SentMaybe, which allows the least.
func Classify(err error) Sent {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Sent
	}
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
		return SentNothing
	}
	if _, ok := errors.AsType[*net.DNSError](err); ok {
		return SentNothing
	}
	return SentMaybe
}

// asError gives errors of foreign round trippers this package's shape.
func asError(ctx context.Context, err error) *Error {
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	return &Error{Sent: Classify(err), Kind: requestKind(ctx, err), Err: err}
}

// requestKind looks at the context first: when it has ended, the failure of the connection is a consequence, and
// net/http reports the context's cause, which can be any error.
func requestKind(ctx context.Context, err error) Kind {
	if cerr := ctx.Err(); cerr != nil {
		if isTimeout(cerr) || isTimeout(context.Cause(ctx)) {
			return KindTimeout
		}
		return KindCanceled
	}
	return kindOf(err)
}

func kindOf(err error) Kind {
	if _, ok := errors.AsType[*net.DNSError](err); ok {
		return KindDNS
	}
	switch {
	case errors.Is(err, context.Canceled):
		return KindCanceled
	case isTimeout(err):
		return KindTimeout
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.EHOSTUNREACH),
		errors.Is(err, syscall.ENETUNREACH):
		return KindRefused
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE), errors.Is(err, syscall.ECONNABORTED):
		return KindReset
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return KindEOF
	case isAlert(err):
		return KindTLS
	}
	return KindOther
}

func isTimeout(err error) bool {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) {
		return true
	}
	ne, ok := errors.AsType[net.Error](err)
	return ok && ne.Timeout()
}

// isAlert reports a TLS alert sent by the other side. crypto/tls gives it as an OpError whose Op is "remote error".
func isAlert(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "remote error"
}

// connectError marks what went wrong before there was a connection, so that RoundTrip need not guess it from the
// error's type: a reset during the TLS handshake looks like a reset during the response.
type connectError struct {
	kind Kind
	err  error
}

func (e *connectError) Error() string { return "connect: " + e.err.Error() }
func (e *connectError) Unwrap() error { return e.err }

func newConnectError(err error, handshake bool) *connectError {
	kind := kindOf(err)
	switch {
	case kind == KindDNS:
		if isTimeout(err) {
			kind = KindConnectTimeout
		}
	case kind == KindTimeout:
		kind = KindConnectTimeout
	case kind == KindCanceled:
	case handshake:
		kind = KindTLS
	}
	return &connectError{kind: kind, err: err}
}

// rejectsCertificate reports failures that the same certificates will meet again.
func rejectsCertificate(err error) bool {
	_, ok := errors.AsType[*tls.CertificateVerificationError](err)
	return ok
}
