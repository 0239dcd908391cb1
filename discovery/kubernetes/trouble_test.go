// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

func TestFaultsAreDescribedWithoutAddresses(t *testing.T) {
	list := call{"list", "pods", "llm"}
	pods := schema.GroupResource{Resource: "pods"}
	broken := func(err error) error {
		return fmt.Errorf("failed: %w", &url.Error{Op: "Get", URL: "https://secret.example", Err: err})
	}
	refused := &net.OpError{Op: "dial", Addr: &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1)}, Err: syscall.ECONNREFUSED}
	for _, c := range []struct {
		err  error
		want string
	}{
		{apierrors.NewForbidden(pods, "", errors.New("secret")),
			`not allowed to list pods in namespace "llm": see manifests/rbac.yaml`},
		{apierrors.NewUnauthorized("secret"), "the API server does not accept the credentials"},
		{apierrors.NewServiceUnavailable("secret"), `the API server refuses to list pods in namespace "llm": 503 ` +
			`Service Unavailable`},
		{apierrors.NewTooManyRequests("secret", 1), `the API server refuses to list pods in namespace "llm": 429 Too ` +
			`Many Requests`},
		{apierrors.NewResourceExpired("secret"), ""},
		{broken(refused), "the API server does not answer: connection refused"},
		{broken(&net.DNSError{Name: "secret.example", Err: "no such host"}), "the API server does not answer"},
		{broken(context.DeadlineExceeded), "the API server does not answer"},
		{broken(&tls.CertificateVerificationError{Err: x509.HostnameError{Host: "secret.example"}}),
			"the API server's certificate does not verify"},
		{broken(errors.New("getting credentials: exec: secret")), "the credentials cannot be got"},
		{errors.New("couldn't get version/kind; secret"), "what the API server answers makes no sense"},
	} {
		assert.Equal(t, c.want, describe(list, c.err))
	}
}

func TestATroubleIsToldOnce(t *testing.T) {
	var told []string
	tell := func() []string { got := told; told = nil; return got }
	s := &troubles{
		tell: func(err error) { told = append(told, err.Error()) }, changed: func() {}, patience: time.Hour,
		calls: map[call]*trouble{},
	}
	list, watch := call{"list", "pods", ""}, call{"watch", "pods", ""}
	refused, reset := &url.Error{Err: syscall.ECONNREFUSED}, &url.Error{Err: syscall.ECONNRESET}
	const first = "kubernetes: the API server does not answer: connection refused (there is no list yet)"

	for range 3 {
		s.hear(list, refused)
		s.hear(watch, refused)
	}
	assert.Equal(t, []string{first}, tell(), "of all calls")
	for range 3 { // as behind a load balancer
		s.hear(list, reset)
		s.hear(list, refused)
	}
	assert.Equal(
		t, []string{"kubernetes: the API server does not answer: connection reset by peer (there is no list yet)"},
		tell(), "to and fro",
	)
	s.hear(list, nil)
	s.hear(list, refused)
	assert.Empty(t, tell(), "the other call has not worked since")
	s.hear(list, nil)
	s.hear(watch, nil)
	s.hear(list, refused)
	assert.Equal(t, []string{first}, tell(), "it is new again")

	s.hear(list, nil)
	s.published()
	s.hear(list, refused)
	assert.Empty(t, tell(), "patience")
	s.calls[list].since = time.Now().Add(-time.Hour)
	s.hear(list, refused)
	s.hear(list, refused)
	assert.Equal(t, []string{"kubernetes: the API server does not answer: connection refused (the last list stays)"},
		tell())
}
