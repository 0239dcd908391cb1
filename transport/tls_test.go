// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/internal/sharedtest"
)

// newTLSEngine serves https with a certificate of ca, and answers with the name in the client's certificate. Clients
// must be known to clients, if given.
func newTLSEngine(t testing.TB, ca, clients *sharedtest.Authority, maxVersion uint16) *httptest.Server {
	t.Helper()
	certPEM, keyPEM := ca.Issue(t, "engine")
	cert, err := tls.X509KeyPair(certPEM, keyPEM)
	require.NoError(t, err)
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if len(r.TLS.PeerCertificates) > 0 {
			_, _ = io.WriteString(w, r.TLS.PeerCertificates[0].Subject.CommonName)
		}
	}))
	s.TLS = &tls.Config{Certificates: []tls.Certificate{cert}, MaxVersion: maxVersion}
	if clients != nil {
		s.TLS.ClientAuth = tls.RequireAndVerifyClientCert
		s.TLS.ClientCAs = clients.Pool()
	}
	s.Config.ErrorLog = quietLog()
	s.StartTLS()
	t.Cleanup(s.Close)
	return s
}

func write(t testing.TB, dir, name string, content []byte) string {
	t.Helper()
	file := filepath.Join(dir, name)
	require.NoError(t, os.WriteFile(file, content, 0o600))
	return file
}

func TestBothSidesShowACertificate(t *testing.T) {
	ca, clients := sharedtest.NewAuthority(t, "engines"), sharedtest.NewAuthority(t, "gateways")
	s := newTLSEngine(t, ca, clients, 0)
	dir := t.TempDir()
	cert, key := clients.Issue(t, "gateway-1")
	config, err := TLSFiles(write(t, dir, "ca.PEM", ca.PEM), write(t, dir, "tls.crt", cert),
		write(t, dir, "tls.key", key), "")
	require.NoError(t, err)
	tr := newTransport(t, &Options{GetTLS: config})
	resp := roundTrip(t, tr, post(t, s.URL, "x"))
	assert.Equal(t, "gateway-1", drain(t, resp))
	require.NotNil(t, resp.TLS)
	assert.Equal(t, "engine", resp.TLS.PeerCertificates[0].Subject.CommonName)
}

func TestANewCertificateIsShownOnceItIsWhole(t *testing.T) {
	ca := sharedtest.NewAuthority(t, "all")
	s := newTLSEngine(t, ca, ca, 0)
	dir := t.TempDir()
	cert, key := ca.Issue(t, "first")
	certFile, keyFile := write(t, dir, "tls.crt", cert), write(t, dir, "tls.key", key)
	config, err := TLSFiles(write(t, dir, "ca.PEM", ca.PEM), certFile, keyFile, "")
	require.NoError(t, err)
	tr := newTransport(t, &Options{GetTLS: config})
	shown := func() string {
		tr.CloseIdleConnections()
		return exchange(t, tr, post(t, s.URL, "x"))
	}
	assert.Equal(t, "first", shown())

	cert, key = ca.Issue(t, "second")
	write(t, dir, "tls.crt", cert)
	assert.Equal(t, "first", shown(), "the new certificate does not fit the old key")
	write(t, dir, "tls.key", key)
	assert.Equal(t, "second", shown())

	require.NoError(t, os.Remove(certFile))
	assert.Equal(t, "second", shown(), "a missing file leaves the last good pair")

	cert, key = ca.Issue(t, "third")
	require.NoError(t, os.Rename(write(t, dir, "new.key", key), keyFile))
	require.NoError(t, os.Rename(write(t, dir, "new.crt", cert), certFile))
	assert.Equal(t, "third", shown(), "files moved into place count as new")
}

func TestFailedHandshakesAreNotSent(t *testing.T) {
	ca, stranger := sharedtest.NewAuthority(t, "ca"), sharedtest.NewAuthority(t, "stranger")
	certPEM, keyPEM := stranger.Issue(t, "unknown")
	unknown, err := tls.X509KeyPair(certPEM, keyPEM)
	require.NoError(t, err)
	plain := newServer(t, func(http.ResponseWriter, *http.Request) {})
	eof := newEngine(t, func(_ *engine, c net.Conn) { _, _ = c.Read(make([]byte, 1)) })
	silent := newEngine(t, func(_ *engine, c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	for _, row := range []struct {
		rule   string
		url    string
		config *tls.Config
		kind   Kind
		final  bool
	}{
		{"the engine's certificate is of an unknown authority", newTLSEngine(t, ca, nil, 0).URL,
			&tls.Config{RootCAs: stranger.Pool()}, KindTLS, true},
		{"the engine's certificate has another name", newTLSEngine(t, ca, nil, 0).URL,
			&tls.Config{RootCAs: ca.Pool(), ServerName: "other.test"}, KindTLS, true},
		{"the engine speaks TLS 1.1 at most", newTLSEngine(t, ca, nil, tls.VersionTLS11).URL,
			&tls.Config{RootCAs: ca.Pool(), MinVersion: tls.VersionTLS10}, KindTLS, false},
		{"the engine rejects the client's certificate (TLS 1.2)", newTLSEngine(t, ca, ca, tls.VersionTLS12).URL,
			&tls.Config{RootCAs: ca.Pool(), Certificates: []tls.Certificate{unknown}}, KindTLS, false},
		{"the engine misses the client's certificate (TLS 1.2)", newTLSEngine(t, ca, ca, tls.VersionTLS12).URL,
			&tls.Config{RootCAs: ca.Pool()}, KindTLS, false},
		{"the engine speaks plain HTTP", "https" + plain.URL[4:], nil, KindTLS, false},
		{"the engine closes within the handshake", "https" + eof.url()[4:], nil, KindTLS, false},
		{"the engine is silent within the handshake", "https" + silent.url()[4:], nil, KindConnectTimeout, false},
	} {
		t.Run(row.rule, func(t *testing.T) {
			limit := 30 * time.Second // which a busy machine does not reach
			if row.kind == KindConnectTimeout {
				limit = 300 * time.Millisecond
			}
			tr := newTransport(t, &Options{TLS: row.config, ConnectTimeout: limit})
			_, err := tr.RoundTrip(post(t, row.url, "x"))
			got := failure(t, err, SentNothing, row.kind)
			assert.Equal(t, row.final, got.final)
		})
	}
}

// With TLS 1.3 the request may be written before the engine's verdict on the client's certificate arrives. If
// the transport reads the verdict, the request was surely not read; if a reset comes first, nobody knows.
func TestARejectedCertificateUnderTLS13IsNeverTakenForAResponse(t *testing.T) {
	ca := sharedtest.NewAuthority(t, "ca")
	s := newTLSEngine(t, ca, ca, tls.VersionTLS13)
	tr := newTransport(t, &Options{TLS: &tls.Config{RootCAs: ca.Pool()}, ConnectTimeout: 30 * time.Second})
	for range 20 {
		_, err := tr.RoundTrip(post(t, s.URL, "x"))
		var got *Error
		require.ErrorAs(t, err, &got)
		if got.Kind == KindTLS {
			assert.Equal(t, SentNothing, got.Sent)
			assert.True(t, got.final)
		} else {
			assert.Contains(t, []Kind{KindReset, KindEOF}, got.Kind, "underlying: %v", got.Err)
		}
	}
}

func TestServerNameReplacesTheHostInChecks(t *testing.T) {
	ca := sharedtest.NewAuthority(t, "ca")
	s := newTLSEngine(t, ca, nil, 0)
	dir := t.TempDir()
	config, err := TLSFiles(write(t, dir, "ca.PEM", ca.PEM), "", "", "engine.test")
	require.NoError(t, err)
	resp, err := newTransport(t, &Options{GetTLS: config}).RoundTrip(post(t, s.URL, "x"))
	require.NoError(t, err)
	drain(t, resp)
	assert.Equal(t, "engine.test", resp.TLS.ServerName)
}

func TestTLSFilesSaysWhichFileAndWhy(t *testing.T) {
	ca := sharedtest.NewAuthority(t, "ca")
	dir := t.TempDir()
	cert, key := ca.Issue(t, "a")
	_, otherKey := ca.Issue(t, "b")
	certFile, keyFile := write(t, dir, "tls.crt", cert), write(t, dir, "tls.key", key)
	other := write(t, dir, "other.key", otherKey)
	text := write(t, dir, "notes.txt", []byte("not PEM"))
	missing := filepath.Join(dir, "missing.pem")
	for _, row := range []struct {
		rule          string
		ca, cert, key string
		says          []string
	}{
		{"CA missing", missing, "", "", []string{"CA file", missing, "no such file"}},
		{"CA without certificate", text, "", "", []string{"CA file", text, "no usable certificate"}},
		{"certificate without key", "", certFile, "", []string{certFile, "without a key file"}},
		{"key without certificate", "", "", keyFile, []string{keyFile, "without a certificate file"}},
		{"certificate missing", "", missing, keyFile, []string{"certificate file", missing, "no such file"}},
		{"key missing", "", certFile, missing, []string{"key file", missing, "no such file"}},
		{"certificate is not PEM", "", text, keyFile, []string{text, keyFile}},
		{"key of another certificate", "", certFile, other, []string{certFile, other, "does not match"}},
	} {
		t.Run(row.rule, func(t *testing.T) {
			_, err := TLSFiles(row.ca, row.cert, row.key, "")
			require.Error(t, err)
			for _, part := range row.says {
				assert.ErrorContains(t, err, part)
			}
			assert.NotContains(t, err.Error(), "PRIVATE KEY-----")
		})
	}
}

func TestTLSBelow12IsNotSpoken(t *testing.T) {
	tr := newTransport(t, &Options{TLS: &tls.Config{MinVersion: tls.VersionTLS10}})
	assert.EqualValues(t, tls.VersionTLS12, tr.tls.MinVersion)
	tr = newTransport(t, &Options{TLS: &tls.Config{MinVersion: tls.VersionTLS13}})
	assert.EqualValues(t, tls.VersionTLS13, tr.tls.MinVersion)
}

func trustOnly(a *sharedtest.Authority) *tls.Config { return &tls.Config{RootCAs: a.Pool()} }

// Engines get certificates of a new authority: once its file is there, new connections trust it and no longer the old.
func TestNewAuthoritiesHoldForNewConnections(t *testing.T) {
	old, next := sharedtest.NewAuthority(t, "old"), sharedtest.NewAuthority(t, "next")
	before, after := newTLSEngine(t, old, nil, 0), newTLSEngine(t, next, nil, 0)
	dir := t.TempDir()
	file := write(t, dir, "ca.PEM", old.PEM)
	config, err := TLSFiles(file, "", "", "")
	require.NoError(t, err)
	for _, netHTTP := range []bool{false, true} {
		write(t, dir, "ca.PEM", old.PEM)
		tr := newTransport(t, &Options{GetTLS: config, NetHTTP: netHTTP})
		assert.Empty(t, exchange(t, tr, post(t, before.URL, "x")))
		write(t, dir, "ca.PEM", next.PEM)
		assert.Empty(t, exchange(t, tr, post(t, after.URL, "x")))
		tr.CloseIdleConnections()
		_, err = tr.RoundTrip(post(t, before.URL, "x"))
		require.ErrorContains(t, err, "the engine's certificate is signed by an unknown authority")
		write(t, dir, "ca.PEM", []byte("half"))
		assert.Empty(t, exchange(t, tr, post(t, after.URL, "x")), "the last good one stays")
	}
}

func TestAServersFilesAreReadAgain(t *testing.T) {
	first, second := sharedtest.NewAuthority(t, "first"), sharedtest.NewAuthority(t, "second")
	clients := sharedtest.NewAuthority(t, "clients")
	dir := t.TempDir()
	cert, key := first.Issue(t, "server")
	certFile, keyFile := write(t, dir, "tls.crt", cert), write(t, dir, "tls.key", key)
	caFile := write(t, dir, "clients.PEM", clients.PEM)
	config, err := ServerTLSFiles(certFile, keyFile, caFile)
	require.NoError(t, err)
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.Proto+" "+r.TLS.PeerCertificates[0].Subject.CommonName)
	}))
	s.Listener = tls.NewListener(s.Listener, config)
	s.Config.ErrorLog = quietLog()
	s.Start()
	defer s.Close()
	url := "https" + s.URL[4:]
	call := func(trusted, issuer *sharedtest.Authority) (string, error) {
		cert, key := issuer.Issue(t, "client")
		pair, err := tls.X509KeyPair(cert, key)
		require.NoError(t, err)
		config := &tls.Config{RootCAs: trusted.Pool(), Certificates: []tls.Certificate{pair}}
		tr := newTransport(t, &Options{TLS: config})
		resp, err := tr.RoundTrip(post(t, url, "x"))
		if err != nil {
			return "", err
		}
		return drain(t, resp), nil
	}
	said, err := call(first, clients)
	require.NoError(t, err)
	assert.Equal(t, "HTTP/1.1 client", said)
	_, err = call(first, second)
	require.Error(t, err, "a client of another authority")

	cert, key = second.Issue(t, "server")
	write(t, dir, "tls.crt", cert)
	write(t, dir, "tls.key", key)
	write(t, dir, "clients.PEM", second.PEM)
	_, err = call(second, second)
	require.NoError(t, err)
	_, err = call(first, second)
	require.Error(t, err, "the old authority's certificate is gone")
	_, err = call(second, clients)
	require.Error(t, err, "clients of the old authority are refused")

	_, err = ServerTLSFiles("", "", caFile)
	require.ErrorContains(t, err, "needs a certificate file")
	_, err = ServerTLSFiles(certFile, keyFile, filepath.Join(dir, "none"))
	require.ErrorContains(t, err, "CA file")
}
