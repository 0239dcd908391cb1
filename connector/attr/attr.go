// SPDX-License-Identifier: Apache-2.0

// Package attr reads the attributes of engines' entries. It also has the rules that decide by attributes which engines
// can exchange KV.
package attr

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/discovery"
)

// The attributes of an engine's entry that decide which engines can exchange KV. Numbers are written in digits, names
// as the engine's flags have them. All are optional: an attribute that is left out forbids no pair.
const (
	Connector = "connector" // the connectors that the engine runs, by name or class name, separated by commas
	Network   = "kvNetwork" // the networks by which its KV can be reached, separated by commas
	TPSize    = "tpSize"    // tensor-parallel size
	PPSize    = "ppSize"    // pipeline-parallel size
	// tokens in a block: vLLM's --block-size, SGLang's --page-size, TensorRT-LLM's tokens_per_block
	BlockSize    = "blockSize"
	KVCacheDtype = "kvCacheDtype" // the type that KV is kept in: --kv-cache-dtype, written alike for all engines
	Store        = "store"        // the stores that it keeps KV in, by names of the list's own, separated by commas
)

// Required is an attribute that an engine's entry must have. A connector's EndpointChecker decides which values are
// right.
type Required struct {
	Name   string
	Role   discovery.Role // the role of the engines that must have it: prefill, decode, or both
	Remedy string         // what to write, for the reader of the error that it is missing
}

// Error says that an engine cannot take part with the entry that it has: an attribute that the protocol needs is
// missing or malformed. The flow tries another pair.
type Error struct {
	Endpoint  string // its ID
	Attribute string
	Problem   string // "is missing", "is not a port"
}

// Error names the engine, the attribute and what is wrong with it.
func (e *Error) Error() string {
	return fmt.Sprintf("endpoint %s: attribute %s %s", e.Endpoint, e.Attribute, e.Problem)
}

// Int reads a whole number from low to high from an endpoint's attribute. It returns def if the attribute is missing.
// The error is an *[Error].
func Int(e discovery.Endpoint, name string, def, low, high int) (int, error) {
	text := strings.TrimSpace(e.Attribute(name))
	if text == "" {
		return def, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < low || n > high {
		return 0, bad(e, name, "is not a number from "+strconv.Itoa(low)+" to "+strconv.Itoa(high))
	}
	return n, nil
}

// Port is [Int] for a port. With def 0 a missing attribute is an error.
func Port(e discovery.Endpoint, name string, def int) (int, error) {
	n, err := Int(e, name, def, 1, 65535)
	if err == nil && n == 0 {
		err = bad(e, name, "is missing")
	}
	return n, err
}

// Ints reads a comma-separated list of whole numbers from low to high. It returns nil if the list is missing or empty.
func Ints(e discovery.Endpoint, name string, low, high int) ([]int, error) {
	if strings.TrimSpace(e.Attribute(name)) == "" {
		return nil, nil
	}
	var list []int
	for text := range strings.SplitSeq(e.Attribute(name), ",") {
		n, err := strconv.Atoi(strings.TrimSpace(text))
		if err != nil || n < low || n > high {
			return nil, bad(e, name, "is not a comma-separated list of numbers from "+strconv.Itoa(low)+
				" to "+strconv.Itoa(high))
		}
		list = append(list, n)
	}
	return list, nil
}

// Text returns an attribute. A missing one is an error.
func Text(e discovery.Endpoint, name string) (string, error) {
	if text := strings.TrimSpace(e.Attribute(name)); text != "" {
		return text, nil
	}
	return "", bad(e, name, "is missing")
}

func bad(e discovery.Endpoint, name, problem string) error {
	return &Error{Endpoint: e.ID, Attribute: name, Problem: problem}
}

// Faults converts the [Error]s in err into faults of the endpoint's entry in a configuration, as a
// connector.EndpointChecker returns them. remedies says for each attribute what would be right; it may be nil. Other
// errors stay as they are.
func Faults(err error, remedies map[string]string) error {
	if err == nil {
		return nil
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var faults []error
		for _, e := range joined.Unwrap() {
			faults = append(faults, Faults(e, remedies))
		}
		return errors.Join(faults...)
	}
	if entry, ok := errors.AsType[*Error](err); ok {
		return &config.FieldError{Path: "attributes." + entry.Attribute, Problem: entry.Problem,
			Remedy: remedies[entry.Attribute]}
	}
	return err
}
