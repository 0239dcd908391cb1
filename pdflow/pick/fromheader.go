// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"cmp"
	"context"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

// PrefillerHeader is the header in which llm-d's scheduler names the prefill engine to the decode engine's sidecar
// (llm-d-router ebab6879, pkg/common/routing/common.go: PrefillEndpointHeader).
const PrefillerHeader = "X-Prefiller-Host-Port"

// maxNamed is how many engines a request may name.
const maxNamed = 64

// HeaderOptions are the settings of [FromHeader].
type HeaderOptions struct {
	// Header holds one or several host:port, separated by commas or in lines of their own, as llm-d's sidecar takes it;
	// http:// before a host is ignored, as there. Default [PrefillerHeader].
	Header string
	// Sample chooses the engine that is tried first: a number from 0 to n-1. Default: always the first, llm-d's
	// default; rand.IntN is its --enable-prefiller-sampling. It must be safe for concurrent use.
	Sample func(n int) int
	// PairOnly is for connectors whose decode engines cannot serve alone (PairOnly of [connector.Traits]): a request
	// without the header is refused. Otherwise decode serves it alone, as llm-d has it.
	PairOnly bool
}

type fromHeader struct {
	set    *discovery.Set
	decode discovery.Endpoint
	o      HeaderOptions
	listed atomic.Pointer[listed]
	judge  atomic.Pointer[judge]
}

// judge knows who can meet by the connector of the last pick: nearly always there is but one.
type judge struct {
	key viewKey
	*pairing
}

// listed are the prefill engines of one snapshot by host and port.
type listed struct {
	snap *discovery.Snapshot
	at   map[string]*discovery.Endpoint
}

// FromHeader is the picker of a sidecar: the client, which is a scheduler, names the prefill engine, and decode is
// always the engine beside the sidecar. A nil o means the defaults.
//
// A header is not trusted: it chooses among the set's endpoints of role prefill or both, by host and port, and nothing
// else. A request that names any other is refused ([pdflow.CodeInvalid], 400), and so is one whose header cannot be
// read. Hosts are compared as they are written: names without regard to case, addresses in any spelling, but a name
// never with its address. (llm-d's sidecar compares hosts alone, if it is told to compare at all.)
//
// So is a request that names an engine which cannot exchange KV with decode by the rules of [New], the connector's own
// among them, as far as the set knows the one and decode's model, version and attributes tell the other. Only the group
// is not looked at: the scheduler has paired them.
//
// Of several engines it takes the first that is ready, and at a further attempt the first that has not failed the
// request yet, if there is one. If none is ready, or before the set's first snapshot, the error wraps
// [pdflow.CodeNoEndpoint]. An encode stage is not picked for.
func FromHeader(set *discovery.Set, decode discovery.Endpoint, o *HeaderOptions) pdflow.Picker {
	f := &fromHeader{set: set, decode: decode}
	if o != nil {
		f.o = *o
	}
	f.o.Header = http.CanonicalHeaderKey(cmp.Or(f.o.Header, PrefillerHeader))
	return f
}

// Changed is closed at the set's next snapshot.
func (f *fromHeader) Changed() <-chan struct{} { return f.set.Changed() }

// Ready tells whether a request that names the right engine would find it. Where decode serves alone, none is needed.
func (f *fromHeader) Ready(in *pdflow.PickInput) error {
	if !f.o.PairOnly {
		return nil
	}
	who := f.pairing(in.Connector)
	for _, e := range f.load().at {
		if e.Phase == discovery.PhaseReady && who.gap(e, &f.decode) == gapNone {
			return nil
		}
	}
	return &pdflow.Error{Code: pdflow.CodeNoEndpoint, Message: "no prefill engine is ready for the decode engine here"}
}

// Pick does not block.
func (f *fromHeader) Pick(_ context.Context, in *pdflow.PickInput) (pdflow.Pick, error) {
	pick := pdflow.Pick{Decode: f.decode}
	again := in.Attempt > 1 // the header was good at the first attempt; engines may have left the list since
	prefill, named, err := f.prefill(in, again)
	switch {
	case err != nil && (!in.Single || !again && pdflow.CodeOf(err) == pdflow.CodeInvalid):
		return pdflow.Pick{}, err
	case in.Single && in.Both && !f.decode.Role.Has(discovery.RoleBoth):
		return pdflow.Pick{}, &pdflow.Error{Code: pdflow.CodeNoEndpoint,
			Message: "the decode engine here serves no request alone"}
	case in.Single:
	case named:
		pick.Prefill = *prefill
	case f.o.PairOnly:
		return pdflow.Pick{}, f.refused("is missing, and the decode engine here serves no request alone")
	}
	return pick, nil
}

// prefill returns the engine that the header names; named is false if it names none.
func (f *fromHeader) prefill(in *pdflow.PickInput, again bool) (e *discovery.Endpoint, named bool, err error) {
	var few [4]*discovery.Endpoint // nearly always there is one
	candidates := few[:0]
	who := f.pairing(in.Connector)
	for _, line := range in.Header[f.o.Header] {
		for text := range strings.SplitSeq(line, ",") {
			if text = strings.TrimSpace(text); text == "" {
				continue
			}
			l := f.load()
			found, ok := l.find(text)
			if !ok || len(candidates) == maxNamed {
				return nil, true, f.refused("is not a list of host:port")
			}
			if found == nil && !again && l.snap.Version > 0 { // else nothing is known of anybody yet
				return nil, true, f.refused("names an engine that is not a prefill engine here")
			}
			if found != nil && who.gap(found, &f.decode) != gapNone {
				if !again {
					return nil, true, f.refused("names an engine that cannot exchange KV with the decode engine here")
				}
				found = nil
			}
			candidates = append(candidates, found)
		}
	}
	if len(candidates) == 0 {
		return nil, false, nil
	}
	if e = f.choose(candidates, in); e == nil {
		return nil, true, &pdflow.Error{Code: pdflow.CodeNoEndpoint,
			Message: "the prefill engine that the request names is not ready"}
	}
	return e, true, nil
}

func (f *fromHeader) pairing(c connector.KVConnector) *pairing {
	key := identify(c, false)
	j := f.judge.Load()
	if j == nil || j.key != key {
		j = &judge{key, newPairing(c, &options{})}
		f.judge.Store(j)
	}
	return j.pairing
}

func (f *fromHeader) choose(candidates []*discovery.Endpoint, in *pdflow.PickInput) (second *discovery.Endpoint) {
	first := 0
	if n := len(candidates); n > 1 && f.o.Sample != nil {
		if first = f.o.Sample(n); first < 0 || first >= n {
			first = 0
		}
	}
	for i := range candidates {
		e := candidates[(first+i)%len(candidates)]
		switch {
		case e == nil || e.Phase != discovery.PhaseReady:
		case !in.Avoids(e.ID):
			return e
		case second == nil:
			second = e
		}
	}
	return second
}

// refused names the header, as the parameter at fault, and not what was in it.
func (f *fromHeader) refused(problem string) error {
	return &pdflow.Error{Code: pdflow.CodeInvalid, Phase: "pick", Param: f.o.Header, Message: problem}
}

// load makes the index of a snapshot once.
func (f *fromHeader) load() *listed {
	snap := f.set.Load()
	l := f.listed.Load()
	if l != nil && l.snap == snap {
		return l
	}
	l = &listed{snap: snap, at: make(map[string]*discovery.Endpoint, len(snap.Endpoints))}
	for i := range snap.Endpoints {
		e := &snap.Endpoints[i]
		if e.URL == nil || !e.Role.Has(discovery.RolePrefill) {
			continue
		}
		port := e.URL.Port()
		if port == "" {
			port = map[string]string{"http": "80", "https": "443"}[e.URL.Scheme]
		}
		key, ok := hostPort(net.JoinHostPort(e.URL.Hostname(), port))
		if old := l.at[key]; ok && (old == nil || old.Phase != discovery.PhaseReady) {
			l.at[key] = e
		}
	}
	f.listed.Store(l)
	return l
}

// find returns nil for an engine that is not there; ok is false for what is no host:port.
func (l *listed) find(text string) (e *discovery.Endpoint, ok bool) {
	if e = l.at[text]; e != nil { // it is written as the index has it
		return e, true
	}
	key, ok := hostPort(strings.TrimPrefix(text, "http://"))
	return l.at[key], ok
}

// hostPort brings an address into the form in which addresses are compared.
func hostPort(text string) (string, bool) {
	host, port, err := net.SplitHostPort(text)
	if err != nil || host == "" || len(host) > 253 {
		return "", false
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return "", false
	}
	if addr, err := netip.ParseAddr(host); err == nil {
		host = addr.Unmap().String()
	} else {
		host = strings.TrimSuffix(strings.ToLower(host), ".")
	}
	return net.JoinHostPort(host, strconv.FormatUint(n, 10)), true
}
