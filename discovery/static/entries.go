// SPDX-License-Identifier: Apache-2.0

package static

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/discovery"
)

// Entry is one engine of a list in a file: of a gateway's configuration, or of package discovery/file.
type Entry struct {
	// http://HOST:PORT or https://HOST:PORT; a path goes before that of each request and probe, and may not be /v1
	URL   string `json:"url"`
	Role  string `json:"role"`  // prefill, decode, both or encode
	Group string `json:"group"` // P and D are paired inside one group
	Zone  string `json:"zone"`  // where it runs, for the picking policy zone
	// what the connector needs to know of the engine; lists in a value are comma separated
	Attributes map[string]string `json:"attributes"`
}

const (
	urlRemedy  = "write http://HOST:PORT"
	roleRemedy = "write prefill, decode, both or encode"
)

// Endpoints converts entries. The error joins all faults of all entries. Each is a [config.FieldError] whose path
// begins with the entry's number in brackets, and holds no value of an entry. The list then has the entries without a
// fault.
func Endpoints(entries []Entry) ([]discovery.Endpoint, error) {
	var errs []error
	list := make([]discovery.Endpoint, 0, len(entries))
	engines := make(map[string]int, len(entries)) // by the URL's host, port and path
	names := make(map[string]int, len(entries))   // by ID
	for i, entry := range entries {
		at := fmt.Sprintf("[%d]", i)
		e, err := entry.endpoint()
		if err != nil {
			errs = append(errs, config.Within(at, err))
			continue
		}
		key := sameEngine(e.URL)
		problem, remedy := "", ""
		if first, twice := engines[key]; twice {
			problem = fmt.Sprintf("is listed twice, first as [%d]", first)
			remedy = "list each engine once; one that serves both legs has role: both"
		} else if first, twice := names[e.ID]; twice { // http://h and https://h
			problem = fmt.Sprintf("has the name of engine [%d], since neither has a port", first)
			remedy = "write the ports"
		}
		if problem != "" {
			errs = append(errs, &config.FieldError{Path: at + ".url", Problem: problem, Remedy: remedy})
			continue
		}
		engines[key], names[e.ID] = i, i
		list = append(list, e)
	}
	return list, errors.Join(errs...)
}

func (n Entry) endpoint() (discovery.Endpoint, error) {
	var errs []error
	fault := func(path, problem, remedy string) {
		errs = append(errs, &config.FieldError{Path: path, Problem: problem, Remedy: remedy})
	}
	role, err := discovery.ParseRole(n.Role)
	switch {
	case n.Role == "":
		fault("role", "is missing", roleRemedy)
	case err != nil:
		fault("role", "is not a role", config.Suggest(n.Role, []string{"prefill", "decode", "both", "encode"}))
	}
	e := discovery.Endpoint{}
	if n.URL == "" {
		fault("url", "is missing", urlRemedy)
	} else if e, err = discovery.New(n.URL, role); err != nil {
		what, _, _ := strings.Cut(err.Error(), ": want")
		if strings.HasPrefix(what, "scheme ") { // the text that follows repeats a value of the entry
			what = "the scheme is not http or https"
		}
		fault("url", "is not an engine's address ("+what+")", urlRemedy)
	}
	e.Group, e.Zone, e.Attributes = n.Group, n.Zone, n.Attributes
	return e, errors.Join(errs...)
}

// sameEngine returns equal texts for URLs that lead to the same engine.
func sameEngine(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	return net.JoinHostPort(strings.ToLower(u.Hostname()), port) + u.Path
}
