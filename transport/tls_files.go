// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"

	"github.com/pdkit/pdkit/internal/reread"
)

// TLSFiles returns client configurations from PEM files, for [Options].GetTLS.
//
// caFile has the authorities that may sign engines' certificates; "" means the system's. certFile and keyFile have the
// certificate for engines that ask for one; give both or neither. serverName is the name to expect in engines'
// certificates; "" means the host of each URL.
//
// When a file has changed, the next connection reads it again. While the new contents cannot be used (they may be half
// written), the last good ones stay in use. Errors name the file and the reason.
func TLSFiles(caFile, certFile, keyFile, serverName string) (func() *tls.Config, error) {
	authorities, err := authorityFile(caFile)
	if err != nil {
		return nil, err
	}
	pair, err := keyPairFiles(certFile, keyFile)
	if err != nil {
		return nil, err
	}
	return func() *tls.Config {
		config := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: serverName}
		if authorities != nil {
			config.RootCAs = authorities.Get()
		}
		if pair != nil {
			config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
				return pair.Get(), nil
			}
		}
		return config
	}, nil
}

// ServerTLSFiles returns the configuration of a server from PEM files, which it reads again as [TLSFiles] does, for
// HTTP/1.1. With clientCAFile each client must show a certificate of one of its authorities.
func ServerTLSFiles(certFile, keyFile, clientCAFile string) (*tls.Config, error) {
	if certFile == "" && keyFile == "" {
		return nil, errors.New("transport: a server needs a certificate file and a key file")
	}
	pair, err := keyPairFiles(certFile, keyFile)
	if err != nil {
		return nil, err
	}
	clients, err := authorityFile(clientCAFile)
	if err != nil {
		return nil, err
	}
	current := func() *tls.Config {
		config := &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"},
			Certificates: []tls.Certificate{*pair.Get()}}
		if clients != nil {
			config.ClientCAs, config.ClientAuth = clients.Get(), tls.RequireAndVerifyClientCert
			config.SessionTicketsDisabled = true // a resumed session would not be checked against new authorities
		}
		return config
	}
	config := current()
	config.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) { return current(), nil }
	return config, nil
}

// authorityFile returns nil for no file.
func authorityFile(path string) (*reread.Files[*x509.CertPool], error) {
	if path == "" {
		return nil, nil
	}
	file := reread.File{What: "CA file", Path: path}
	return opened(reread.Open(func(pem [][]byte) (*x509.CertPool, error) {
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem[0]) {
			return nil, fmt.Errorf("%s %s: no usable certificate in it (PEM, type CERTIFICATE, is expected)", file.What,
				file.Path)
		}
		return pool, nil
	}, file))
}

// keyPairFiles returns nil for no files.
func keyPairFiles(certFile, keyFile string) (*reread.Files[*tls.Certificate], error) {
	switch {
	case certFile == "" && keyFile == "":
		return nil, nil
	case certFile == "":
		return nil, fmt.Errorf("transport: key file %s is given without a certificate file", keyFile)
	case keyFile == "":
		return nil, fmt.Errorf("transport: certificate file %s is given without a key file", certFile)
	}
	return opened(reread.Open(func(pem [][]byte) (*tls.Certificate, error) {
		cert, err := tls.X509KeyPair(pem[0], pem[1])
		if err != nil {
			return nil, fmt.Errorf("certificate file %s with key file %s: %w", certFile, keyFile, err)
		}
		return &cert, nil
	}, reread.File{What: "certificate file", Path: certFile}, reread.File{What: "key file", Path: keyFile}))
}

func opened[T any](files *reread.Files[T], err error) (*reread.Files[T], error) {
	if err != nil {
		return nil, fmt.Errorf("transport: %w", err)
	}
	return files, nil
}
