// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/file"
	"github.com/pdkit/pdkit/pdflow/admit"
	"github.com/pdkit/pdkit/pdflow/modelserver"
)

// printCheck writes what a configuration means, defaults included. It shows no value of a connector's own settings,
// since passwords are among them.
func printCheck(w io.Writer, cfg *configuration) error {
	b := bufio.NewWriter(w)
	g := cfg.gateway
	fmt.Fprintf(b, "%s: well formed, %s\n", cfg.file, count(len(cfg.models), "model"))
	fmt.Fprintf(b, "listen        %s\n", g.Listen)
	if g.Admin == "" {
		fmt.Fprintln(b, "admin         off")
	} else {
		fmt.Fprintf(b, "admin         %s\n", g.Admin)
	}
	fmt.Fprintf(b, "bodies        at most %d bytes\n", g.MaxBodyBytes)
	if g.MaxBytesInFlight > 0 {
		fmt.Fprintf(b, "in flight     at most %d bytes\n", g.MaxBytesInFlight)
	}
	fmt.Fprintf(b, "drain         %s\n", span(time.Duration(g.DrainTimeout), "at once"))
	if g.Passthrough != "" {
		fmt.Fprintln(b, "passthrough   what is no inference goes to a decode engine")
		if len(g.PassthroughPaths) > 0 {
			fmt.Fprintf(b, "              by its own list and %s\n", strings.Join(g.PassthroughPaths, ", "))
		}
	}
	if len(g.ForwardHeaders) > 0 {
		fmt.Fprintf(b, "headers       of clients that engines get, too: %s\n", strings.Join(g.ForwardHeaders, ", "))
	}
	if g.TLS != nil {
		text := "HTTPS for clients"
		if g.TLS.ClientCAFile != "" {
			text += ", who show a certificate"
		}
		fmt.Fprintf(b, "TLS           %s\n", text)
	}
	if g.RegistrationTokenFile != "" {
		fmt.Fprintf(b, "registration  by HTTP with a token of %s\n", g.RegistrationTokenFile)
	}
	if c := g.ModelServers; c != nil {
		fmt.Fprintf(b, "ModelServers  those of namespace %s, too\n", cmp.Or(c.Namespace, "default"))
	}
	for _, m := range cfg.models {
		printModel(b, cfg, m)
	}
	for _, kind := range []noteKind{warning, withoutEffect} {
		for _, n := range cfg.notes {
			if n.kind == kind {
				fmt.Fprintln(b, n.String())
			}
		}
	}
	return b.Flush()
}

// String returns the note as -check and the log show it.
func (n note) String() string { return fmt.Sprintf("%s: %s", n.kind, n.Fault) }

func printModel(w io.Writer, cfg *configuration, m *modelServer) {
	fmt.Fprintf(w, "\n%s\n", m.label())
	m.printConnector(w, "connector", "spec.kvConnector", m.Main)
	if m.Rollout != nil {
		m.printConnector(w, fmt.Sprintf("rollout %d%%", *m.Spec.Rollout.Weight), "spec.rollout.kvConnector", m.Rollout)
	}
	if m.Has("spec.encoder") {
		row(w, "encoder", m.Spec.Encoder.Type)
	}
	for _, name := range slices.Sorted(maps.Keys(m.Spec.ModelNames)) {
		row(w, "name", fmt.Sprintf("%q is %q at the engines", name, m.Spec.ModelNames[name]))
	}
	m.printAdmission(w)
	m.printDecision(w)
	kind := m.FoundBy
	endpoints := m.Endpoints
	defer func() { m.printTLS(w, endpoints) }()
	switch kind {
	case "static":
		row(w, "discovery", "static, "+count(len(endpoints), "endpoint"))
	case "file":
		endpoints, _ = file.Load(cfg.beside(m.Spec.Discovery.File.Path)) // unusable has read it
		row(w, "discovery", "file "+m.Spec.Discovery.File.Path+", "+count(len(endpoints), "endpoint")+" now")
	case "dns":
		row(w, "discovery", "dns, "+describeDNS(m.Spec.Discovery.DNS))
		return
	case "registration":
		row(w, "discovery", "registration, "+describeRegistration(m.Spec.Discovery.Registration))
		return
	default:
		row(w, "discovery", "kubernetes, "+m.describePods())
		return
	}
	for _, e := range endpoints {
		row(w, "  "+e.Role.String(), place(e))
	}
}

// printTLS says how https engines are checked.
func (m *modelServer) printTLS(w io.Writer, endpoints []discovery.Endpoint) {
	t := m.Spec.TLS
	if t == (modelserver.TLS{}) && !slices.ContainsFunc(endpoints,
		func(e discovery.Endpoint) bool { return e.URL.Scheme == "https" }) {
		return
	}
	text := "https engines are checked against " + cmp.Or(t.CAFile, "the system's certificate authorities")
	if t.ServerName != "" {
		text += " and the name " + t.ServerName
	}
	if t.CertFile != "" {
		text += ", and shown " + t.CertFile
	}
	row(w, "TLS", text+", TLS 1.2 or later")
}

// printAdmission writes the limits of the model's engines, if they have any.
func (m *modelServer) printAdmission(w io.Writer) {
	o := m.AdmitOptions()
	if o == nil {
		return
	}
	limit := func(n int) string {
		if n == 0 {
			return "no limit"
		}
		return strconv.Itoa(n)
	}
	row(w, "admission", fmt.Sprintf("%s, at most %s per prefill engine, %s per decode engine, %d wait for at most %s",
		m.Spec.Admission.Mode, limit(o.PrefillLimit), limit(o.DecodeLimit), max(cmp.Or(o.Queue, admit.DefaultQueue), 0),
		cmp.Or(o.QueueTimeout, admit.DefaultQueueTimeout)))
}

// printConnector writes a connector, which the field at path names, and those it falls back to.
func (m *modelServer) printConnector(w io.Writer, title, path string, o *modelserver.Connector) {
	row(w, title, o.Name+", "+o.KVConnector.Traits().Order.String())
	if names := settings(o.Spec.Config); len(names) > 0 {
		row(w, "  config", strings.Join(names, ", "))
	}
	lease := o.Lease()
	limits := o.Timeouts()
	handoff := span(limits.Handoff, "no limit")
	if lease > 0 {
		handoff += " of a lease of " + lease.String()
	}
	row(
		w, "  timeouts", fmt.Sprintf("connect %s, prefill %s, handoff %s, transfer %s, decode %s, idle %s, "+
			"cleanup %s, healthCheck %s",
			span(limits.Connect, "none"), span(limits.Prefill, "none"), handoff, span(limits.Transfer, "none"),
			span(limits.Decode, "none"), span(limits.Idle, "none"), span(limits.Cleanup, "none"),
			span(limits.HealthCheck, "none")))
	if after := o.GivesUp(); limits.Transfer <= 0 && after > 0 && (limits.Decode <= 0 || limits.Decode > after) {
		why := "P keeps KV that nobody reads for"
		if lease <= 0 {
			why = "the engines give a transfer up after"
		}
		found := "after decode, " + span(limits.Decode, "never")
		if o.KVConnector.Traits().Order == connector.Together && limits.Prefill > 0 {
			found = fmt.Sprintf("after prefill, %s, where P answers when D has read it, else %s", limits.Prefill, found)
		}
		row(w, "  recommended", fmt.Sprintf("timeouts.transfer: %s %s; without it a transfer that never ends is "+
			"found %s", why, after, found))
	}
	a := o.Retry()
	if a.MaxAttempts == 1 {
		row(w, "  retry", "1 attempt")
	} else {
		row(
			w, "  retry", fmt.Sprintf("%d attempts, pauses up to %s, later up to %s, budget %g", a.MaxAttempts,
				max(a.BackoffBase, 0), max(a.BackoffMax, 0), a.Budget),
		)
	}
	var limitsOfStores []string
	r := o.Spec.Resources
	for _, q := range []struct {
		name, field string
		q           config.Quantity
	}{{"memory", "maxMemory", r.MaxMemory}, {"disk", "maxDisk", r.MaxDisk},
		{"bandwidth", "maxBandwidth", r.MaxBandwidth}} {
		if q.q != "" && !m.isIdle(path+".resources."+q.field) { // of those without effect a note says so
			limitsOfStores = append(limitsOfStores, q.name+" "+string(q.q))
		}
	}
	if len(limitsOfStores) > 0 {
		row(w, "  resources", strings.Join(limitsOfStores, ", ")+": rendered for the engines")
	}
	row(w, "  unsupported", string(cmp.Or(o.Spec.Unsupported, config.UnsupportedAggregate)))
	row(w, "  fallback", string(cmp.Or(o.Spec.Fallback, config.FallbackError)))
	if o.Fallback != nil {
		m.printConnector(w, "falls back to", path+".fallbackConnector", o.Fallback)
	}
}

// isIdle reports whether a note says that a field has no effect.
func (m *modelServer) isIdle(path string) bool {
	return slices.ContainsFunc(m.Notes, func(n modelserver.Note) bool { return n.NoEffect && n.Path == path })
}

// settings lists the names of a connector's settings. Their values stay hidden.
func settings(config json.RawMessage) []string {
	var m map[string]json.RawMessage
	if json.Unmarshal(config, &m) != nil {
		return nil
	}
	return slices.Sorted(maps.Keys(m))
}

func row(w io.Writer, name, text string) { fmt.Fprintf(w, "  %-15s %s\n", name, text) }

func span(d time.Duration, zero string) string {
	if d <= 0 {
		return zero
	}
	return d.String()
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// place is where an endpoint is, for the operator's eyes.
func place(e discovery.Endpoint) string {
	s := e.URL.String()
	if e.URL.Path != "" {
		s += " (probed at " + e.URL.Path + "/health)"
	}
	if e.Group != "" {
		s += ", group " + e.Group
	}
	if e.Zone != "" {
		s += ", zone " + e.Zone
	}
	if len(e.Attributes) > 0 {
		s += ", with " + strings.Join(slices.Sorted(maps.Keys(e.Attributes)), ", ")
	}
	return s
}
