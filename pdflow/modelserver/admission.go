// SPDX-License-Identifier: Apache-2.0

package modelserver

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/pdflow/admit"
)

// Admission bounds what the model's engines are given: see package admit.
type Admission struct {
	// off; fixed: the limits below; adaptive: limits found by measuring, which never exceed those below
	Mode               AdmissionMode `json:"mode"`
	InFlightPerPrefill int           `json:"inFlightPerPrefill"` // requests at one prefill engine at the same time
	// requests at one decode engine at the same time, until their responses have ended
	InFlightPerDecode int `json:"inFlightPerDecode"`
	// requests that may wait until an engine has room; 0: none
	Queue        *int             `json:"queue"`
	QueueTimeout *config.Duration `json:"queueTimeout"` // how long one may wait; then it gets 503
	// a client's header with a priority, of which the least goes first; "": none. Whoever sends it decides who waits
	PriorityHeader string `json:"priorityHeader"`
}

// AdmissionMode says where the limits come from.
type AdmissionMode string

// The modes. "" is AdmissionOff.
const (
	AdmissionOff      AdmissionMode = "off"
	AdmissionFixed    AdmissionMode = "fixed"
	AdmissionAdaptive AdmissionMode = "adaptive"
)

// UnmarshalJSON reads a mode. The boolean false is off, since some readers of YAML take off for it.
func (m *AdmissionMode) UnmarshalJSON(raw []byte) error {
	raw = bytes.TrimSpace(raw)
	if bytes.Equal(raw, []byte("false")) {
		*m = AdmissionOff
		return nil
	}
	var s string
	modes := []string{string(AdmissionOff), string(AdmissionFixed), string(AdmissionAdaptive)}
	if json.Unmarshal(raw, &s) != nil || !slices.Contains(modes, s) {
		return &config.FieldError{Problem: "is not a known mode", Remedy: config.Suggest(s, modes)}
	}
	*m = AdmissionMode(s)
	return nil
}

// AdmitOptions returns the limits for the model's picker, nil where admission is off.
func (m *ModelServer) AdmitOptions() *admit.Options {
	a := &m.Spec.Admission
	if a.off() {
		return nil
	}
	o := &admit.Options{Adaptive: a.Mode == AdmissionAdaptive, PrefillLimit: a.InFlightPerPrefill,
		DecodeLimit: a.InFlightPerDecode}
	if a.Queue != nil {
		if o.Queue = *a.Queue; o.Queue == 0 {
			o.Queue = -1
		}
	}
	if a.QueueTimeout != nil {
		o.QueueTimeout = time.Duration(*a.QueueTimeout)
	}
	if a.PriorityHeader != "" {
		o.Priority = admit.PriorityHeader(a.PriorityHeader)
	}
	return o
}

func (a *Admission) off() bool { return a.Mode == "" || a.Mode == AdmissionOff }

func (m *ModelServer) checkAdmission() {
	const at = "spec.admission"
	a := &m.Spec.Admission
	for _, n := range []struct {
		name  string
		value int
	}{{"inFlightPerPrefill", a.InFlightPerPrefill}, {"inFlightPerDecode", a.InFlightPerDecode}} {
		if n.value < 0 {
			m.fault(at+"."+n.name, "is negative", "write how many requests one engine may have, or leave it out")
		}
	}
	if a.Queue != nil && *a.Queue < 0 {
		m.fault(at+".queue", "is negative", "write how many requests may wait, 0 for none")
	}
	if a.QueueTimeout != nil && *a.QueueTimeout == 0 {
		m.fault(at+".queueTimeout", "is 0", "write how long a request may wait, or queue: 0 for no queue")
	}
	if strings.ContainsFunc(a.PriorityHeader, func(r rune) bool {
		return r != '-' && r != '_' && (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z')
	}) {
		m.fault(at+".priorityHeader", "is not a header's name", `write a name like "X-Vllm-Priority"`)
	}
	switch {
	case a.off() && *a != (Admission{Mode: a.Mode}):
		m.note(true, at, "its mode is off", "write mode: fixed or mode: adaptive")
	case a.Mode == AdmissionFixed && a.InFlightPerPrefill == 0 && a.InFlightPerDecode == 0:
		m.fault(at, "has no limit", "write inFlightPerPrefill or inFlightPerDecode, or mode: adaptive")
	}
}
