// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"sync"
)

// TLSFiles returns a client configuration from PEM files, for [Options].TLS.
//
// caFile has the authorities that may sign engines' certificates; "" means the system's. certFile and keyFile have the
// certificate for engines that ask for one; give both or neither. serverName is the name to expect in engines'
// certificates; "" means the host of each URL.
//
// When a file has changed, a new connection reads the certificate again. While the new pair cannot be used (it may be
// half written), the last good one stays in use. caFile is read once. Errors name the file and the reason.
func TLSFiles(caFile, certFile, keyFile, serverName string) (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: serverName}
	if caFile != "" {
		pool, err := readAuthorities(caFile)
		if err != nil {
			return nil, err
		}
		config.RootCAs = pool
	}
	switch {
	case certFile == "" && keyFile == "":
	case certFile == "":
		return nil, fmt.Errorf("transport: key file %s is given without a certificate file", keyFile)
	case keyFile == "":
		return nil, fmt.Errorf("transport: certificate file %s is given without a key file", certFile)
	default:
		pair := &keyPair{certFile: certFile, keyFile: keyFile}
		if err := pair.load(); err != nil {
			return nil, err
		}
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return pair.current(), nil
		}
	}
	return config, nil
}

func readAuthorities(file string) (*x509.CertPool, error) {
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, fileError("CA file", file, err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fileError(
			"CA file", file, errors.New("no usable certificate in it (PEM, type CERTIFICATE, is expected)"),
		)
	}
	return pool, nil
}

// fileError names the path once, since errors of package os have it, too.
func fileError(what, file string, err error) error {
	if pe, ok := errors.AsType[*os.PathError](err); ok {
		err = pe.Err
	}
	return fmt.Errorf("transport: %s %s: %w", what, file, err)
}

// keyPair is a certificate and its key on disk.
type keyPair struct {
	certFile, keyFile string

	mu                sync.Mutex
	certInfo, keyInfo os.FileInfo // of the files when they were last tried
	cert              *tls.Certificate
}

// current looks at the files once for each handshake that asks for a certificate; that is rare compared with requests.
func (p *keyPair) current() *tls.Certificate {
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = p.loadLocked()
	return p.cert
}

func (p *keyPair) load() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.loadLocked()
}

func (p *keyPair) loadLocked() error {
	certInfo, err := os.Stat(p.certFile)
	if err != nil {
		return fileError("certificate file", p.certFile, err)
	}
	keyInfo, err := os.Stat(p.keyFile)
	if err != nil {
		return fileError("key file", p.keyFile, err)
	}
	if p.cert != nil && sameFile(certInfo, p.certInfo) && sameFile(keyInfo, p.keyInfo) {
		return nil
	}
	certPEM, err := os.ReadFile(p.certFile)
	if err != nil {
		return fileError("certificate file", p.certFile, err)
	}
	keyPEM, err := os.ReadFile(p.keyFile)
	if err != nil {
		return fileError("key file", p.keyFile, err)
	}
	cert, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return fmt.Errorf("transport: certificate file %s with key file %s: %w", p.certFile, p.keyFile, err)
	}
	// Only a working pair is remembered. A pair that was being written is tried again for the next connection, whatever
	// the clock's resolution.
	p.cert, p.certInfo, p.keyInfo = &cert, certInfo, keyInfo
	return nil
}

// sameFile returns false for a file that was written again, for another file at its path, and after a change of the
// symbolic links by which Kubernetes updates a Secret.
func sameFile(a, b os.FileInfo) bool {
	return os.SameFile(a, b) && a.Size() == b.Size() && a.ModTime().Equal(b.ModTime())
}
