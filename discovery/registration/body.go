// SPDX-License-Identifier: Apache-2.0

package registration

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// Bounds of a registration.
const (
	maxBody       = 64 << 10
	maxText       = 256 // bytes of an id, group, zone, model or version
	maxURL        = 2048
	maxAttributes = 32
	maxName       = 64
	maxValue      = 1024
)

// fieldError names the field that is wrong, without its value.
type fieldError struct{ field, problem string }

func (e *fieldError) Error() string {
	if e.field == "" {
		return e.problem
	}
	return e.field + ": " + e.problem
}

// registrationBody is the body of POST /v1/endpoints.
type registrationBody struct {
	ID           string            `json:"id"`
	URL          string            `json:"url"`
	Role         string            `json:"role"`
	Group        string            `json:"group"`
	Zone         string            `json:"zone"`
	Model        string            `json:"model"`
	Version      string            `json:"version"`
	Attributes   map[string]string `json:"attributes"`
	LeaseSeconds *int              `json:"leaseSeconds"`
}

// readRegistration reads and checks a body.
func readRegistration(raw []byte, lease time.Duration) (discovery.Endpoint, time.Duration, *fieldError) {
	var b registrationBody
	if bad := decode(raw, &b); bad != nil {
		return discovery.Endpoint{}, 0, bad
	}
	for _, f := range []struct{ name, value string }{{"group", b.Group}, {"zone", b.Zone}, {"model", b.Model},
		{"version", b.Version}} {
		if problem := checkText(f.value, maxText); problem != "" {
			return discovery.Endpoint{}, 0, &fieldError{f.name, problem}
		}
	}
	if bad := checkAttributes(b.Attributes); bad != nil {
		return discovery.Endpoint{}, 0, bad
	}
	if s := b.LeaseSeconds; s != nil {
		if lease = time.Duration(*s) * time.Second; *s < int(minLease/time.Second) || *s > int(maxLease/time.Second) {
			return discovery.Endpoint{}, 0, &fieldError{"leaseSeconds", "is not one of 1 to 3600"}
		}
	}
	role, err := discovery.ParseRole(b.Role)
	if err != nil {
		return discovery.Endpoint{}, 0, &fieldError{"role", "is not one of prefill, decode, both, encode"}
	}
	if b.URL == "" || len(b.URL) > maxURL {
		return discovery.Endpoint{}, 0, &fieldError{"url", "is missing or too long: want http://HOST:PORT"}
	}
	e, err := discovery.New(b.URL, role)
	if err != nil {
		return discovery.Endpoint{}, 0, &fieldError{"url", "is not an engine's address: want http://HOST:PORT"}
	}
	if b.ID != "" {
		e.ID = b.ID
	}
	if problem := checkText(e.ID, maxText); problem != "" { // also for an ID that came from the URL
		return discovery.Endpoint{}, 0, &fieldError{"id", problem}
	}
	if strings.ContainsFunc(e.ID, unicode.IsSpace) {
		return discovery.Endpoint{}, 0, &fieldError{"id", "has spaces"}
	}
	e.Group, e.Zone, e.Model, e.Version, e.Attributes = b.Group, b.Zone, b.Model, b.Version, b.Attributes
	return e, lease, nil
}

// decode reads one JSON object and refuses unknown members, since a misspelt member would be missing only in the
// engine's first request.
func decode(raw []byte, into *registrationBody) *fieldError {
	if !utf8.Valid(raw) { // encoding/json would replace invalid text
		return &fieldError{"", "the body is not UTF-8"}
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	err := d.Decode(into)
	if bad, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		if bad.Field == "" {
			return &fieldError{"", "the body is not a JSON object"}
		}
		return &fieldError{clip(bad.Field), "is not of type " + bad.Type.String()}
	}
	if err != nil {
		if name, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
			if name, err = strconv.Unquote(name); err == nil {
				return &fieldError{clip(name), "is not a known field"}
			}
		}
		return &fieldError{"", "the body is not a JSON object"}
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) || bytes.HasPrefix(bytes.TrimSpace(raw), []byte("null")) {
		return &fieldError{"", "the body is not one JSON object"}
	}
	return checkOnce(raw, "")
}

// checkOnce refuses a member that stands twice in the body or in its attributes. encoding/json takes the last one and
// does not tell, while a proxy that checks the engine's address may have read the first. It folds the case of the
// body's own names, as encoding/json does.
func checkOnce(raw []byte, holder string) *fieldError {
	doc, err := jsonedit.Parse(raw)
	if twice, ok := errors.AsType[*jsonedit.DuplicateError](err); ok {
		return &fieldError{holder + clip(twice.Name), "stands twice"}
	}
	if err != nil {
		return &fieldError{"", "the body is not one JSON object"}
	}
	seen := map[string]bool{}
	for i := 0; i < doc.Len() && holder == ""; i++ {
		name := strings.ToLower(strings.ToUpper(doc.Name(i))) // both, as letters such as the long s fold only upwards
		if seen[name] {
			return &fieldError{clip(name), "stands twice"}
		}
		if seen[name] = true; name == "attributes" && jsonedit.Kind(doc.Value(i)) == jsonedit.Object {
			if bad := checkOnce(doc.Value(i), "attributes."); bad != nil {
				return bad
			}
		}
	}
	return nil
}

// clip shortens a name that came in a request, so that the response stays short.
func clip(name string) string {
	if len(name) > maxName {
		return name[:maxName] + "…"
	}
	return name
}

func checkAttributes(attributes map[string]string) *fieldError {
	if len(attributes) > maxAttributes {
		return &fieldError{"attributes", "are more than " + strconv.Itoa(maxAttributes)}
	}
	for name, value := range attributes {
		if name == "" || len(name) > maxName || strings.ContainsFunc(name, notName) {
			return &fieldError{"attributes", "have a name that is not 1 to " + strconv.Itoa(maxName) +
				" of letters, digits, '.', '_', '-' and '/'"}
		}
		if problem := checkText(value, maxValue); problem != "" {
			return &fieldError{"attributes." + name, problem}
		}
	}
	return nil
}

func notName(r rune) bool {
	return !strings.ContainsRune("._-/", r) && (r < '0' || r > '9') && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z')
}

func checkText(text string, most int) string {
	switch {
	case len(text) > most:
		return "has more than " + strconv.Itoa(most) + " bytes"
	case !utf8.ValidString(text) || strings.ContainsFunc(text, unicode.IsControl):
		return "has control characters"
	}
	return ""
}
