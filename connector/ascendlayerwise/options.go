// SPDX-License-Identifier: Apache-2.0

package ascendlayerwise

import (
	"errors"
	"net"
	"net/url"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/config"
)

// Defaults of the settings.
const (
	DefaultCallbackListen = "127.0.0.1:8600"
	DefaultKVPort         = 30000
)

// Options are the connector's settings.
type Options struct {
	// CallbackListen is the address at which this process listens for decode engines' callbacks, host:port; default
	// 127.0.0.1:8600. Connectors of one process that name the same address share the listener. Port 0 is any free port,
	// each time another.
	CallbackListen string `json:"callbackListen"`
	// CallbackURL is the URL at which decode engines reach that address, http://host:port; /v1/metaserver is added. It
	// is needed if CallbackListen is a wildcard; default http:// and CallbackListen.
	CallbackURL string `json:"callbackURL"`
	// KVPort is the first kv_port of the launch settings; default 30000.
	KVPort int `json:"kvPort"`
}

func (o *Options) read(c *Connector) error {
	var faults []error
	fault := func(path, problem, remedy string) {
		faults = append(faults, &config.FieldError{Path: path, Problem: problem, Remedy: remedy})
	}
	c.listen, c.kvPort = DefaultCallbackListen, DefaultKVPort
	if o.CallbackListen != "" {
		c.listen = o.CallbackListen
	}
	if o.KVPort != 0 {
		if c.kvPort = o.KVPort; c.kvPort < 1 || c.kvPort > 65535 {
			fault("kvPort", "is not a port", "1 to 65535")
		}
	}
	if o.CallbackURL != "" {
		var ok bool
		if c.url, ok = baseURL(o.CallbackURL); !ok {
			fault("callbackURL", "is not an http or https URL of a host alone",
				"http://host:port, to which /v1/metaserver is added")
		}
	}
	host, port, err := net.SplitHostPort(c.listen)
	n, atoiErr := strconv.ParseUint(port, 10, 16)
	switch {
	case err != nil || atoiErr != nil || strings.ContainsAny(host, "/ @"):
		fault("callbackListen", "is not an address", "host:port, as "+DefaultCallbackListen)
	case o.CallbackURL != "":
	case wildcard(host):
		fault("callbackURL", "is missing, and callbackListen is a wildcard, which decode engines cannot reach",
			"the URL at which decode engines reach this process: http://host:port")
	case n != 0:
		c.url = "http://" + net.JoinHostPort(host, port)
	}
	return errors.Join(faults...)
}

func wildcard(host string) bool {
	ip := net.ParseIP(host)
	return host == "" || ip != nil && ip.IsUnspecified()
}

// baseURL reads a URL without user, query and fragment, and drops a slash at its end.
func baseURL(text string) (string, bool) {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.User != nil ||
		u.RawQuery != "" || u.ForceQuery || u.Fragment != "" || wildcard(u.Hostname()) {
		return "", false
	}
	if port := u.Port(); port != "" {
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return "", false
		}
	}
	return strings.TrimRight(u.String(), "/"), true
}
