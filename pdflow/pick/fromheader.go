// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"cmp"
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/internal/names"
)

// PrefillerHeader is the header in which llm-d's scheduler names the prefill engine to the decode engine's sidecar
// (llm-d-router ebab6879, pkg/common/routing/common.go: PrefillEndpointHeader).
const PrefillerHeader = "X-Prefiller-Host-Port"

// NoHeader is the Alone of a pick of [FromHeader] whose request names no prefill engine: pd.reason of the metrics. If
// the scheduler names one for each request, such a request has gone round the scheduler.
const NoHeader = "no_header"

// maxNamed is how many engines a request may name.
const maxNamed = 64

// HeaderOptions are the settings of [FromHeader].
type HeaderOptions struct {
	// Header names the header. Its value is one or several host:port, separated by commas or in several header lines,
	// as llm-d's sidecar accepts them; http:// before a host is ignored, as there. Default [PrefillerHeader].
	Header string
	// Sample chooses which of n named engines is tried first, as a number from 0 to n-1. The default is always the
	// first, which is llm-d's default, too; rand.IntN does what llm-d's --enable-prefiller-sampling does. Sample must
	// be safe for concurrent use.
	Sample func(n int) int
	// PairOnly refuses requests without the header. Set it for connectors whose decode engines cannot serve alone
	// (PairOnly of [connector.Traits]), and where each request must come from the scheduler. Without it the decode
	// engine serves such a request alone, as in llm-d, and the pick says so: see [NoHeader].
	PairOnly bool
}

// fromHeader is what one flow asks: the sidecar with the flow's rules.
type fromHeader struct {
	*sidecar
	pairing *pairing
}

// sidecar is what all pickers share that were bound from one of FromHeader.
type sidecar struct {
	set    *discovery.Set
	decode discovery.Endpoint
	o      HeaderOptions
	listed atomic.Pointer[listed]
	names  names.Index
}

// listed are the prefill engines of one snapshot by host and port.
type listed struct {
	snap *discovery.Snapshot
	at   map[string]*discovery.Endpoint
}

// FromHeader returns the picker of a sidecar. The client is a scheduler and names the prefill engine in a header;
// decode is always the engine beside the sidecar. A nil o means the defaults.
//
// The picker does not trust the header. A client can only choose among the set's endpoints of role prefill or both, by
// host and port. A request that names another engine, or whose header cannot be read, is refused with
// [pdflow.CodeInvalid] (400). Host names are compared without regard to case, and addresses in any spelling; a name
// never equals an address. (llm-d's sidecar compares hosts alone, and only if it is configured to.)
//
// The picker also refuses an engine that cannot exchange KV with decode by the rules of [New], which include the
// connector's own. It judges by what the set knows about the named engine and by decode's model, version and
// attributes. It does not compare groups, since the scheduler has formed the pair.
//
// If the header names several engines, the first attempt takes the first ready one, and a later attempt the first ready
// one that has not failed this request yet, if there is one. If none is ready, or before the set's first snapshot, the
// error wraps [pdflow.CodeNoEndpoint]. The picker names no encode engines.
//
// Where the program itself has chosen the prefill engine ([pdflow.Request].Prefill), the header is not read.
func FromHeader(set *discovery.Set, decode discovery.Endpoint, o *HeaderOptions) pdflow.Picker {
	s := &sidecar{set: set, decode: decode}
	if o != nil {
		s.o = *o
	}
	s.o.Header = http.CanonicalHeaderKey(cmp.Or(s.o.Header, PrefillerHeader))
	return (&fromHeader{sidecar: s}).Bind(nil, connector.Serving{})
}

// Bind returns a picker with a connector's rules that shares all else with this one.
func (f *fromHeader) Bind(c connector.KVConnector, serving connector.Serving) pdflow.Picker {
	return &fromHeader{f.sidecar, newPairing(c, serving, &options{})}
}

// Changed is closed at the set's next snapshot.
func (f *fromHeader) Changed() <-chan struct{} { return f.set.Changed() }

// NamesEngine reports whether a word names an engine of the set. Those of decode the flow knows.
func (f *fromHeader) NamesEngine(word string) bool { return f.names.Has(f.set.Load(), word) }

// EngineHealth tells what the set's health probes have shown.
func (f *fromHeader) EngineHealth(id string) (well, known bool) { return healthIn(f.set, id) }

// Ready tells whether a request that names the right engine would find it. Where decode serves alone, none is needed.
func (f *fromHeader) Ready(*pdflow.PickInput) error {
	if !f.o.PairOnly {
		return nil
	}
	for _, e := range f.load().at {
		if e.Phase == discovery.PhaseReady && f.pairing.gap(e, &f.decode) == gapNone {
			return nil
		}
	}
	return &pdflow.Error{Code: pdflow.CodeNoEndpoint, Message: "no prefill engine is ready for the decode engine here"}
}

// Pick does not block.
func (f *fromHeader) Pick(_ context.Context, in *pdflow.PickInput) (pdflow.Pick, error) {
	if in.Decode != "" && in.Decode != f.decode.ID {
		return pdflow.Pick{}, notHere("decode")
	}
	pick := pdflow.Pick{Decode: f.decode}
	again := in.Attempt > 1 // the header was good at the first attempt, but engines may have left the list since
	prefill, named, err := f.prefill(in, again)
	switch {
	case err != nil && (!in.Single || !again && errors.Is(err, pdflow.CodeInvalid)):
		return pdflow.Pick{}, err
	case in.Single && f.pairing.serving.PairOnly && !f.decode.Role.Has(discovery.RoleBoth):
		return pdflow.Pick{}, &pdflow.Error{Code: pdflow.CodeNoEndpoint,
			Message: "the decode engine here serves no request alone"}
	case !named && f.o.PairOnly:
		return pdflow.Pick{}, f.refused("is missing, and the decode engine here serves no request alone")
	case !named:
		pick.Reason = NoHeader
	case !in.Single:
		pick.Prefill = *prefill
	}
	return pick, nil
}

// prefill returns the engine that the header names; named is false if it names none.
func (f *fromHeader) prefill(in *pdflow.PickInput, again bool) (e *discovery.Endpoint, named bool, err error) {
	if in.Prefill != "" && !in.Single {
		e, err = f.chosen(in.Prefill)
		return e, true, err
	}
	var few [4]*discovery.Endpoint // nearly always one is enough
	candidates := few[:0]
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
			// before the first snapshot the picker cannot tell whether the engine exists
			if found == nil && !again && l.snap.Version > 0 {
				return nil, true, f.refused("names an engine that is not a prefill engine here")
			}
			if found != nil && f.pairing.gap(found, &f.decode) != gapNone {
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

// chosen returns the prefill engine that the program has chosen.
func (f *fromHeader) chosen(id string) (*discovery.Endpoint, error) {
	snap := f.set.Load()
	switch e := find(snap, id); {
	case snap.Version == 0:
		return nil, notNow("the engines are not known yet")
	case e == nil || e.URL == nil || !e.Role.Has(discovery.RolePrefill):
		return nil, notHere("prefill")
	case e.Phase != discovery.PhaseReady:
		return nil, notNow("the prefill engine that is to serve this request is not ready")
	case f.pairing.gap(e, &f.decode) != gapNone:
		return nil, notNow("the prefill engine that is to serve this request cannot exchange KV with the engine here")
	default:
		return e, nil
	}
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

// refused returns an error that names the header as the parameter at fault, without the header's value.
func (f *fromHeader) refused(problem string) error {
	return &pdflow.Error{Code: pdflow.CodeInvalid, Phase: "pick", Param: f.o.Header, Message: problem}
}

// load returns the index of the latest snapshot; it builds each index once.
func (s *sidecar) load() *listed {
	snap := s.set.Load()
	l := s.listed.Load()
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
	s.listed.Store(l)
	return l
}

// find returns nil if no engine has that address; ok is false if text is not host:port.
func (l *listed) find(text string) (e *discovery.Endpoint, ok bool) {
	if e = l.at[text]; e != nil { // text is spelled as in the index
		return e, true
	}
	key, ok := hostPort(strings.TrimPrefix(text, "http://"))
	return l.at[key], ok
}

// hostPort returns an address in the spelling in which addresses are compared.
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
