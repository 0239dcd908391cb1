// SPDX-License-Identifier: Apache-2.0

package sharedtest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"sync/atomic"
	"testing"
	"time"
)

// Authority issues certificates.
type Authority struct {
	PEM  []byte        // its own certificate
	Life time.Duration // of the certificates that it issues; below zero, they have expired

	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

var serials atomic.Int64

// NewAuthority makes an authority.
func NewAuthority(t testing.TB, name string) *Authority {
	t.Helper()
	a := &Authority{Life: time.Hour, key: newKey(t)}
	a.cert = about(name, time.Hour)
	a.cert.IsCA, a.cert.BasicConstraintsValid, a.cert.KeyUsage = true, true, x509.KeyUsageCertSign
	a.PEM = a.sign(t, a.cert, a.key)
	return a
}

// Pool has the authority as the only one that is trusted.
func (a *Authority) Pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AppendCertsFromPEM(a.PEM)
	return p
}

// Issue returns PEM of a certificate for 127.0.0.1 and engine.test, and of its key.
func (a *Authority) Issue(t testing.TB, name string) (cert, key []byte) {
	t.Helper()
	c := about(name, a.Life)
	c.KeyUsage = x509.KeyUsageDigitalSignature
	c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	c.IPAddresses, c.DNSNames = []net.IP{net.IPv4(127, 0, 0, 1)}, []string{"engine.test"}
	private := newKey(t)
	der, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return a.sign(t, c, private), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})
}

func about(name string, life time.Duration) *x509.Certificate {
	return &x509.Certificate{SerialNumber: big.NewInt(serials.Add(1)), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(life)}
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func (a *Authority) sign(t testing.TB, c *x509.Certificate, key *ecdsa.PrivateKey) []byte {
	t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}
