// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"net/url"

	"github.com/pdkit/pdkit/discovery"
)

// span is a range of ports: from is in it, to is not.
type span struct{ from, to int }

// nextPort chooses the first port of an engine to which nothing gives one: the next one from base on that no other
// engine of its host has or is given. host says on which host an engine is. ports returns the port that an engine has
// whatever ports the others have, or 0, and how many it needs from there on. It is 0 if no port is left.
func nextPort(t Target, base int, host func(discovery.Endpoint) string,
	ports func(discovery.Endpoint) (first, n int, err error)) int {
	var taken []span
	var before []int // how many ports each engine without one needs, up to the target itself
	seen := false
	for _, e := range t.Engines {
		first, n, err := ports(e)
		switch {
		case err != nil || host(e) != host(t.Endpoint): // a faulty entry is reported when its own engine is rendered
		case first != 0:
			taken = append(taken, span{first, first + n})
		case !seen:
			before = append(before, n)
			seen = e.ID == t.Endpoint.ID
		}
	}
	if !seen {
		_, n, _ := ports(t.Endpoint)
		before = append(before, max(n, 1))
	}
	at := base
	for i, n := range before {
		if i > 0 {
			at += before[i-1]
		}
		at = skip(at, n, taken)
	}
	if at+before[len(before)-1]-1 > 65535 {
		return 0
	}
	return at
}

// skip moves a run of n ports up until none of them is taken.
func skip(at, n int, taken []span) int {
	for i := 0; i < len(taken); i++ {
		if s := taken[i]; at < s.to && s.from < at+n {
			at, i = s.to, -1
		}
	}
	return at
}

// portOf is the port of an engine's own HTTP server.
func portOf(e discovery.Endpoint) string {
	if e.URL == nil {
		return "8000" // vLLM's own
	}
	return portOfURL(e.URL)
}

func portOfURL(u *url.URL) string {
	switch {
	case u.Port() != "":
		return u.Port()
	case u.Scheme == "https":
		return "443"
	}
	return "80"
}
