// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// certificate returns the function that gives a listener its certificate: tls.crt and tls.key of a folder, read again
// when they change, or without a folder a self-signed one.
func certificate(folder string) (func(*tls.ClientHelloInfo) (*tls.Certificate, error), error) {
	if folder == "" {
		own, err := selfSigned()
		if err != nil {
			return nil, fmt.Errorf("making a certificate: %w", err)
		}
		return func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return own, nil }, nil
	}
	k := &keeper{cert: filepath.Join(folder, "tls.crt"), key: filepath.Join(folder, "tls.key")}
	if err := k.read(); err != nil {
		return nil, err
	}
	return k.get, nil
}

// keeper reads a certificate again when its files change. If it cannot read them it keeps the last good certificate,
// since the files may be half written.
type keeper struct {
	cert, key string
	mu        sync.Mutex
	good      *tls.Certificate
	changed   time.Time // the modification time of the file from which good was read
	looked    time.Time
}

const lookEvery = time.Second

func (k *keeper) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if time.Since(k.looked) > lookEvery {
		_ = k.read()
	}
	return k.good, nil
}

func (k *keeper) read() error {
	k.looked = time.Now()
	info, err := os.Stat(k.cert)
	if err != nil || info.ModTime().Equal(k.changed) {
		return err
	}
	pair, err := tls.LoadX509KeyPair(k.cert, k.key)
	if err != nil {
		return err
	}
	k.good, k.changed = &pair, info.ModTime()
	return nil
}

func selfSigned() (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(now.UnixNano()), Subject: pkix.Name{CommonName: "pdkit sidecar"},
		NotBefore: now.Add(-time.Minute), NotAfter: now.AddDate(10, 0, 0),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}
