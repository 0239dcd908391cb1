// SPDX-License-Identifier: Apache-2.0

package request

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/internal/jsonedit"
)

// transferMembers have the transfer instructions of the protocols that pdkit knows. They are never accepted from a
// client, whichever connector serves it: they choose whose memory an engine reads, or kill the engine
// (docs/protocols/nixl.md §3). A connector declares the other members that it uses in its Traits, Members.
var transferMembers = []string{
	"kv_transfer_params", "ec_transfer_params", "disaggregated_params",
	"bootstrap_host", "bootstrap_port", "bootstrap_room",
}

// transferHolders are members inside which vLLM also reads these instructions.
var transferHolders = []string{"vllm_xargs", "sampling_params"}

// ids are members with which a client could choose its id at the engines. Engines must use the header's id: on
// /v1/responses a member overrides it. SGLang's rid does more, also on an engine that serves alone: when a client
// leaves, SGLang aborts all requests whose ids begin with its rid, and with "" all requests (managers/scheduler.py,
// abort_request).
var ids = [...]string{"request_id", "rid"}

// Without returns the edits with which legs start that carry none of these members of the client's, each a path as in
// connector.Traits. It returns r.Strip itself, and false, if the body has none. It also removes top-level members where
// vLLM reads them again: inside vllm_xargs and sampling_params, and inside extra_args in these. Parse has already
// removed those of the protocols that pdkit knows. The error is a *[Fault] if an object on the way names a member
// twice, since an engine might then read another value than the one that was removed, or if a value on the way is
// neither an object nor null, since the connector could not set its member there.
func (r *Request) Without(members []string) (strip []jsonedit.Edit, changed bool, err error) {
	return r.without(members, false)
}

// without is Without. If strict is true, it looks into the objects in which vLLM reads members again whatever they
// contain, and refuses malformed ones.
func (r *Request) without(members []string, strict bool) (strip []jsonedit.Edit, changed bool, err error) {
	strip = r.Strip
	change := func(e jsonedit.Edit) {
		if !changed {
			strip, changed = slices.Clone(strip), true
		}
		strip = Edit(strip, e)
	}
	for _, path := range members {
		name, below, nested := strings.Cut(path, ".")
		raw, ok := Current(&r.Doc, strip, name)
		if !ok {
			continue
		}
		if !nested {
			change(jsonedit.Edit{Name: name, Delete: true})
			continue
		}
		clean, err := stripPath(raw, below)
		if err != nil {
			return nil, false, nestedError(name, err)
		}
		if clean != nil {
			change(jsonedit.Edit{Name: name, Value: clean})
		}
	}
	for _, holder := range transferHolders {
		raw, ok := Current(&r.Doc, strip, holder)
		if !ok {
			continue
		}
		clean, err := stripHolder(raw, members, strict, true)
		if err != nil {
			return nil, false, nestedError(holder, err)
		}
		if clean != nil {
			change(jsonedit.Edit{Name: holder, Value: clean})
		}
	}
	return strip, changed, nil
}

// Current returns a top-level member with edits applied. It returns null as null.
func Current(d *jsonedit.Doc, edits []jsonedit.Edit, name string) (json.RawMessage, bool) {
	for i := range edits {
		if edits[i].Name == name {
			return edits[i].Value, !edits[i].Delete
		}
	}
	return d.Get(name)
}

// Edit adds an edit in place of an earlier one of the same member.
func Edit(edits []jsonedit.Edit, e jsonedit.Edit) []jsonedit.Edit {
	for i := range edits {
		if edits[i].Name == e.Name {
			edits[i] = e
			return edits
		}
	}
	return append(edits, e)
}

// stripPath removes a nested member from an object. It returns nil if there is nothing to remove. The error says that
// Leg.SetAt could not set the member there: it must not fail between the legs, when P already holds KV.
func stripPath(raw []byte, path string) ([]byte, error) {
	name, below, nested := strings.Cut(path, ".")
	if jsonedit.Kind(raw) == jsonedit.Null {
		return nil, nil
	}
	var d jsonedit.Doc
	if err := d.ParseInto(raw); err != nil {
		return nil, err
	}
	inner, ok := d.Get(name)
	switch {
	case !ok:
		return nil, nil
	case !nested:
		return jsonedit.DeleteIn(raw, name)
	}
	clean, err := stripPath(inner, below)
	if err != nil {
		return nil, nestedError(name, err)
	}
	if clean == nil {
		return nil, nil
	}
	return jsonedit.SetIn(raw, name, clean)
}

// stripHolder removes top-level transfer members from vllm_xargs or sampling_params and, withExtra, from the extra_args
// inside. It returns nil if there is nothing to remove. No engine reads them any deeper. If it followed extra_args
// further, a body nested 10,000 deep would cost as many passes.
func stripHolder(raw []byte, members []string, strict, withExtra bool) (out []byte, err error) {
	inside := func(m string) bool { return !strings.Contains(m, ".") && mayName(raw, m) }
	if jsonedit.Kind(raw) != jsonedit.Object || !strict && !slices.ContainsFunc(members, inside) {
		return nil, nil
	}
	d, err := jsonedit.Parse(raw)
	if err != nil {
		return nil, err
	}
	rest := raw
	for _, name := range members {
		if _, ok := d.Get(name); ok && !strings.Contains(name, ".") {
			if rest, err = jsonedit.DeleteIn(rest, name); err != nil {
				return nil, err
			}
			out = rest
		}
	}
	if extra, ok := d.Get("extra_args"); ok && withExtra {
		clean, err := stripHolder(extra, members, strict, false)
		if err != nil {
			return nil, nestedError("extra_args", err)
		}
		if clean != nil {
			return jsonedit.SetIn(rest, "extra_args", clean)
		}
	}
	return out, nil
}

// mayName reports whether a value may have a member of that name at some depth: it contains the name's text, or a name
// with escapes.
func mayName(raw []byte, name string) bool {
	return bytes.Contains(raw, []byte(name)) || bytes.IndexByte(raw, '\\') >= 0
}
