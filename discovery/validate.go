// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Validate returns an error if the endpoint is unusable: no ID, no URL or one that [ParseURL] refuses, or an unknown
// role or phase. A [Set] takes every endpoint for which it returns nil.
func (e Endpoint) Validate() error {
	if e.ID == "" {
		return errors.New("endpoint without an ID")
	}
	if e.URL == nil {
		return fmt.Errorf("endpoint %q has no URL", e.ID)
	}
	if err := checkURL(e.URL); err != nil {
		return fmt.Errorf("endpoint %q: %w", e.ID, err)
	}
	if _, ok := roleNames[e.Role]; !ok {
		return fmt.Errorf("endpoint %q: %v is not one of prefill, decode, both, encode", e.ID, e.Role)
	}
	if e.Phase > PhaseDraining {
		return fmt.Errorf("endpoint %q: %v is not one of ready, not-ready, draining", e.ID, e.Phase)
	}
	return nil
}

// checkURL checks the rules of an engine's base URL.
func checkURL(u *url.URL) error {
	switch {
	case u.Scheme != "http" && u.Scheme != "https":
		return fmt.Errorf("scheme %q: want http://HOST:PORT or https://HOST:PORT", u.Scheme)
	case u.Hostname() == "":
		return errors.New("no host: want http://HOST:PORT")
	case u.User != nil:
		return errors.New("user info is not allowed in an engine's URL")
	case strings.HasSuffix(u.Host, ":") || !validPort(u.Port()):
		return errors.New("the port is not one of 1 to 65535: want http://HOST:PORT")
	// the path may become a part of the ID, and so of logs
	case !utf8.ValidString(u.Path) || strings.ContainsFunc(u.Path, unicode.IsControl):
		return errors.New("control characters are not allowed in an engine's URL")
	case u.RawQuery != "" || u.Fragment != "" || u.ForceQuery:
		return errors.New("query and fragment are not allowed in an engine's URL")
	}
	for _, own := range requestPaths {
		if strings.HasSuffix(strings.TrimRight(u.Path, "/"), own) {
			return errors.New("the path ends in " + own + ", which each request adds itself: want http://HOST:PORT")
		}
	}
	return nil
}

// requestPaths are what people copy from a client's settings into an engine's base URL. An engine would get
// /v1/v1/chat/completions.
var requestPaths = []string{"/v1", "/v1/chat/completions", "/v1/completions", "/v1/models", "/health"}

// validPort reports whether a port is empty, for the scheme's port, or a number from 1 to 65535.
func validPort(port string) bool {
	if port == "" {
		return true
	}
	n, err := strconv.Atoi(port)
	return err == nil && n >= 1 && n <= 65535
}
