// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"encoding/json"
	"errors"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/connector/config"
	"github.com/pdkit/pdkit/discovery"
)

// IntAttribute reads a whole number from low to high among an endpoint's attributes; def where it is missing. The error is an
// *[EndpointError].
func IntAttribute(e discovery.Endpoint, name string, def, low, high int) (int, error) {
	text := strings.TrimSpace(e.Attribute(name))
	if text == "" {
		return def, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < low || n > high {
		return 0, &EndpointError{Endpoint: e.ID, Attribute: name, Problem: "is not a number from " + strconv.Itoa(low) + " to " + strconv.Itoa(high)}
	}
	return n, nil
}

// PortAttribute is [IntAttribute] for a port. def is 0 where the attribute must be there.
func PortAttribute(e discovery.Endpoint, name string, def int) (int, error) {
	n, err := IntAttribute(e, name, def, 1, 65535)
	if err == nil && n == 0 {
		err = &EndpointError{Endpoint: e.ID, Attribute: name, Problem: "is missing"}
	}
	return n, err
}

// IntsAttribute reads a comma-separated list of whole numbers from low to high. A missing or empty list is nil.
func IntsAttribute(e discovery.Endpoint, name string, low, high int) ([]int, error) {
	if strings.TrimSpace(e.Attribute(name)) == "" {
		return nil, nil
	}
	var list []int
	for text := range strings.SplitSeq(e.Attribute(name), ",") {
		n, err := strconv.Atoi(strings.TrimSpace(text))
		if err != nil || n < low || n > high {
			return nil, &EndpointError{Endpoint: e.ID, Attribute: name, Problem: "is not a comma-separated list of numbers from " + strconv.Itoa(low) + " to " + strconv.Itoa(high)}
		}
		list = append(list, n)
	}
	return list, nil
}

// TextAttribute returns an attribute that must be there.
func TextAttribute(e discovery.Endpoint, name string) (string, error) {
	if text := strings.TrimSpace(e.Attribute(name)); text != "" {
		return text, nil
	}
	return "", &EndpointError{Endpoint: e.ID, Attribute: name, Problem: "is missing"}
}

// AttributeFaults turns the [EndpointError]s in err, which a connector meets when it reads an endpoint, into faults of the endpoint's entry in a
// configuration, as an [EndpointChecker] returns them. remedies say by attribute what would be right; nil is allowed. Other errors stay as
// they are.
func AttributeFaults(err error, remedies map[string]string) error {
	if err == nil {
		return nil
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var faults []error
		for _, e := range joined.Unwrap() {
			faults = append(faults, AttributeFaults(e, remedies))
		}
		return errors.Join(faults...)
	}
	if bad, ok := errors.AsType[*EndpointError](err); ok {
		return &config.FieldError{Path: "attributes." + bad.Attribute, Problem: bad.Problem, Remedy: remedies[bad.Attribute]}
	}
	return err
}

// Quote writes s as a JSON string. Text that is not UTF-8 is repaired.
func Quote(s string) json.RawMessage {
	raw, _ := json.Marshal(s) // of a string it never fails
	return raw
}

// Int writes n as JSON.
func Int[T ~int | ~int64 | ~uint64](n T) json.RawMessage {
	if n < 0 {
		return strconv.AppendInt(nil, int64(n), 10)
	}
	return strconv.AppendUint(nil, uint64(n), 10)
}
