// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"crypto/tls"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/internal/sharedtest"
)

// issue writes a certificate of an authority for 127.0.0.1 and its key to DIR/NAME.pem and DIR/NAME-key.pem.
func issue(t *testing.T, a *sharedtest.Authority, dir, name string) {
	t.Helper()
	cert, key := a.Issue(t, name)
	lists(t, filepath.Join(dir, name+"-key.pem"), string(key))
	lists(t, filepath.Join(dir, name+".pem"), string(cert))
}

// secured is an engine that speaks HTTPS, to clients of an authority only. What it is and whom it trusts may change.
type secured struct {
	*engine
	config atomic.Pointer[tls.Config]
}

func newSecured(t *testing.T) *secured {
	t.Helper()
	s := &secured{engine: &engine{}}
	s.Server = httptest.NewUnstartedServer(s.engine)
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.TLS = &tls.Config{MinVersion: tls.VersionTLS12, SessionTicketsDisabled: true,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return s.config.Load(), nil }}
	t.Cleanup(s.Close)
	return s
}

// become gives the engine a certificate of an authority, and clients of this and the others.
func (s *secured) become(t *testing.T, a *sharedtest.Authority, clients ...*sharedtest.Authority) {
	t.Helper()
	dir := t.TempDir()
	issue(t, a, dir, "engine")
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "engine.pem"), filepath.Join(dir, "engine-key.pem"))
	require.NoError(t, err)
	trusted := a.Pool()
	for _, c := range clients {
		trusted.AppendCertsFromPEM(c.PEM)
	}
	s.config.Store(&tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair},
		SessionTicketsDisabled: true, ClientCAs: trusted, ClientAuth: tls.RequireAndVerifyClientCert})
	if s.URL == "" {
		s.StartTLS()
	}
}

const engineTLS = "  tls: {caFile: engines.pem, certFile: client.pem, keyFile: client-key.pem}\n" +
	"  kvConnector: {type: http, timeouts: {connect: 30s, healthCheck: 30s}}\n" // a busy machine is no fault

// Client, gateway and engines change all their certificates and authorities while 100 requests a second run, each on a
// new connection to the gateway, and none fails: new authorities are trusted before certificates of theirs are used.
func TestCertificatesChangeUnderTraffic(t *testing.T) {
	t.Parallel()
	first, second := sharedtest.NewAuthority(t, "first"), sharedtest.NewAuthority(t, "second")
	both := string(append(bytes.Clone(first.PEM), second.PEM...))
	e, d := newSecured(t), newSecured(t)
	e.become(t, first)
	d.become(t, first)
	g := prepare(t, gatewayYAML(", tls: {certFile: gateway.pem, keyFile: gateway-key.pem, clientCAFile: clients.PEM}")+
		pairYAML("m", e.engine, d.engine, engineTLS))
	dir := filepath.Dir(g.file)
	authorities := func(text string) {
		lists(t, filepath.Join(dir, "engines.pem"), text)
		lists(t, filepath.Join(dir, "clients.PEM"), text)
	}
	certificates := func(a *sharedtest.Authority) {
		issue(t, a, dir, "gateway")
		issue(t, a, dir, "client")
	}
	authorities(string(first.PEM))
	certificates(first)
	g.start()
	url := "https" + strings.TrimPrefix(g.client, "http")

	own := t.TempDir()
	client := func(shown, trusted *sharedtest.Authority) *http.Client {
		issue(t, shown, own, "user")
		pair, err := tls.LoadX509KeyPair(filepath.Join(own, "user.pem"), filepath.Join(own, "user-key.pem"))
		require.NoError(t, err)
		return &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{
			MinVersion: tls.VersionTLS12, RootCAs: trusted.Pool(), Certificates: []tls.Certificate{pair}}}}
	}
	all := &sharedtest.Authority{PEM: []byte(both)}
	tr := sendBy(t, client(first, all), url+"/v1/completions", func(int64) string { return completion }, 100)
	pause := func() { time.Sleep(300 * time.Millisecond) }
	pause()
	authorities(both)
	e.become(t, first, second)
	d.become(t, first, second)
	pause()
	certificates(second)
	e.become(t, second, first)
	d.become(t, second, first)
	pause()
	g.signals <- syscall.SIGHUP // changes nothing about files that are read again when they change
	g.logs(1, reloadedLine)
	pause()
	assert.Empty(t, tr.end(), "of %d\n%s", tr.sent.Load(), g.log)
	t.Logf("%d requests, none failed", tr.sent.Load())

	authorities(string(second.PEM))
	assert.Empty(t, ask(client(second, second), url+"/v1/completions", completion, "1"))
	assert.NotEmpty(t, ask(client(first, second), url+"/v1/completions", completion, "2"), "a client of the old one")
	assert.Contains(t, ask(client(second, first), url+"/v1/completions", completion, "3"), "unknown authority")
	anonymous := &http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: second.Pool()}}}
	assert.NotEmpty(t, ask(anonymous, url+"/v1/completions", completion, "4"), "a client without a certificate")
}

// Engines whose certificate is of another authority are not spoken to: clients get 502 or 503 without the reason, and
// the log says it.
func TestAnEngineOfAnotherAuthorityIsRefused(t *testing.T) {
	t.Parallel()
	right, wrong := sharedtest.NewAuthority(t, "right"), sharedtest.NewAuthority(t, "wrong")
	e, d := newSecured(t), newSecured(t)
	e.become(t, wrong, right)
	d.become(t, wrong, right)
	g := prepare(t, gatewayYAML("")+pairYAML("m", e.engine, d.engine, engineTLS))
	dir := filepath.Dir(g.file)
	lists(t, filepath.Join(dir, "engines.pem"), string(right.PEM))
	issue(t, right, dir, "client")
	g.start()
	status, _, body := g.complete(completion)
	assert.Contains(t, []int{http.StatusBadGateway, http.StatusServiceUnavailable}, status)
	assert.NotContains(t, body, "certificate")
	g.logs(2, "the engine's certificate is signed by an unknown authority")
	assert.Zero(t, e.count()+d.count())
	lists(t, filepath.Join(dir, "engines.pem"), string(wrong.PEM))
	eventually(t, func() bool {
		status, _, _ := g.complete(completion)
		return status == http.StatusOK
	}, "%s", g.log)
}

// Files that cannot be used are faults for -check, end a start, and leave a reload without effect.
func TestFilesOfTLSThatCannotBeUsed(t *testing.T) {
	e, d := newEngine(t), newEngine(t)
	for field, yaml := range map[string]string{
		"spec.tls: transport: CA file ": gatewayYAML("") + pairYAML("m", e, d, "  tls: {caFile: none.pem}\n"),
		"spec.tls: transport: certificate file ": gatewayYAML(", tls: {certFile: none.pem, keyFile: none.pem}") +
			pairYAML("m", e, d, ""),
		"registration: token file ": gatewayYAML(", registrationTokenFile: none.pem") +
			announcing("m", "http", "http: 127.0.0.1:0"),
	} {
		t.Run(field, func(t *testing.T) {
			g := prepare(t, yaml)
			assert.Equal(t, exitFailed, run([]string{"-config", g.file}, io.Discard, g.log, g.signals))
			assert.Contains(t, g.log.String(), field+filepath.Join(filepath.Dir(g.file), "none.pem")+": no such file")
			code, stdout, stderr := check(t, "-config", g.file)
			assert.Equal(t, exitWrong, code)
			assert.Empty(t, stdout)
			assert.Contains(t, stderr, "no such file")
		})
	}
	g := start(t, gatewayYAML("")+pairYAML("m", e, d, ""))
	g.configure(gatewayYAML("") + pairYAML("m", e, d, "  tls: {caFile: none.pem}\n"))
	g.logs(1, refusedLine)
	assert.Contains(t, g.debug().Configuration.Error, "no such file")
}

// With a token file, engines register only with one of its tokens. The file may change, and no token is ever logged.
func TestEnginesRegisterWithAToken(t *testing.T) {
	e := newEngine(t)
	g := prepare(t, gatewayYAML(", registrationTokenFile: token")+
		announcing("m", "http", "http: 127.0.0.1:0"), "-log-level", "debug")
	token := filepath.Join(filepath.Dir(g.file), "token")
	lists(t, token, "first-secret\n")
	g.start()
	register := func(authorization string) int {
		return g.register("p", e.URL, "both", nil, "Authorization", authorization)
	}
	assert.Equal(t, http.StatusUnauthorized, register(""))
	assert.Equal(t, http.StatusUnauthorized, register("Bearer second-secret"))
	assert.Equal(t, http.StatusCreated, register("Bearer first-secret"))
	lists(t, token, "second-secret\n")
	assert.Equal(t, http.StatusOK, register("Bearer second-secret"))
	assert.Equal(t, http.StatusUnauthorized, register("Bearer first-secret"))
	require.NoError(t, os.Remove(token))
	g.signals <- syscall.SIGHUP
	g.logs(1, reloadedLine)
	assert.Equal(t, http.StatusOK, register("Bearer second-secret"))
	assert.NotContains(t, g.log.String(), "-secret")
	assert.NotContains(t, g.page("/debug/pd"), "-secret")
}
