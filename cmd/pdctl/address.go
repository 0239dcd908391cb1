// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"
	"net/url"
	"strings"

	"github.com/pdkit/pdkit/cmd/pdctl/measure"
)

// baseURL reads a server's base address from the command line: a URL, or HOST:PORT. It has no trailing /v1.
func baseURL(flag, text string) (string, error) {
	if _, _, err := net.SplitHostPort(text); err == nil && !strings.Contains(text, "/") {
		text = "http://" + text
	}
	u, err := url.Parse(text)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return "", fmt.Errorf("%s is no URL; write one like http://127.0.0.1:8000", flag)
	}
	return measure.Address(text, ""), nil
}
