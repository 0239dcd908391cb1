// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// errEnded is a server that ended before it was ready.
var errEnded = errors.New("ended")

// process is one server.
type process struct {
	name  string
	cmd   *exec.Cmd
	ended chan struct{} // closed when it has ended and been waited for
}

// run starts a server with its output in a file of its name. It also ends if this process is killed.
func (c *Cluster) run(name string, flags ...string) (*process, error) {
	log, err := os.OpenFile(c.path(name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	//nolint:noctx,gosec // it outlives the call, and its path is fixed
	p := &process{name: name, cmd: exec.Command(c.binary, append([]string{name}, flags...)...),
		ended: make(chan struct{})}
	p.cmd.Dir, p.cmd.Stdout, p.cmd.Stderr = c.dir, log, log
	p.cmd.Env = []string{"HOME=" + c.dir} // etcd takes options from the environment
	endWithParent(p.cmd)
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = p.cmd.Wait()
		close(p.ended)
	}()
	return p, nil
}

// kill ends it at once: an orderly end takes over a minute while informers are connected. Nil allowed.
func (p *process) kill() {
	if p == nil {
		return
	}
	_ = p.cmd.Process.Kill()
	<-p.ended
}

// await returns when url answers 200.
func (p *process) await(transport http.RoundTripper, url string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	pause := time.NewTicker(20 * time.Millisecond)
	defer pause.Stop()
	last := errors.New("no response")
	for {
		status, err := get(ctx, transport, url)
		if status == http.StatusOK {
			return nil
		}
		if err == nil {
			err = fmt.Errorf("status %d", status)
		}
		if ctx.Err() == nil {
			last = err
		}
		select {
		case <-p.ended:
			return fmt.Errorf("%s %w: %s", p.name, errEnded, p.cmd.ProcessState)
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready after %v: %w", p.name, patience, last)
		case <-pause.C:
		}
	}
}

func get(ctx context.Context, transport http.RoundTripper, url string) (int, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return 0, err
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode, err
}

// keys are what clients need of the throw-away authority; the servers' are in files.
type keys struct{ ca, adminCert, adminKey []byte }

// writeKeys makes ca.crt, server.crt, server.key and sa.key (which signs tokens) in dir, and the administrator's pair.
func writeKeys(dir string) (*keys, error) {
	k := &keys{}
	caKey, _, err := newKey()
	if err != nil {
		return nil, err
	}
	ca := &x509.Certificate{Subject: pkix.Name{CommonName: "kubetest"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign}
	if k.ca, err = sign(ca, ca, caKey, caKey); err != nil {
		return nil, err
	}
	server := &x509.Certificate{
		Subject: pkix.Name{CommonName: "kube-apiserver"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	admin := &x509.Certificate{
		Subject:     pkix.Name{CommonName: "admin", Organization: []string{"system:masters"}},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	serverCert, serverKey, err := issue(server, ca, caKey)
	if err != nil {
		return nil, err
	}
	if k.adminCert, k.adminKey, err = issue(admin, ca, caKey); err != nil {
		return nil, err
	}
	_, accountKey, err := newKey()
	if err != nil {
		return nil, err
	}
	for name, data := range map[string][]byte{"ca.crt": k.ca, "server.crt": serverCert, "server.key": serverKey,
		"sa.key": accountKey} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			return nil, err
		}
	}
	return k, nil
}

// issue returns a certificate and its key.
func issue(cert, ca *x509.Certificate, caKey *ecdsa.PrivateKey) (certPEM, keyPEM []byte, err error) {
	key, keyPEM, err := newKey()
	if err != nil {
		return nil, nil, err
	}
	certPEM, err = sign(cert, ca, key, caKey)
	return certPEM, keyPEM, err
}

func newKey() (*ecdsa.PrivateKey, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, nil, err
	}
	return key, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), nil
}

func sign(cert, ca *x509.Certificate, key, caKey *ecdsa.PrivateKey) ([]byte, error) {
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		return nil, err
	}
	cert.SerialNumber = serial
	cert.NotBefore, cert.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(24*time.Hour)
	der, err := x509.CreateCertificate(rand.Reader, cert, ca, &key.PublicKey, caKey)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), nil
}
