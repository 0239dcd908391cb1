// SPDX-License-Identifier: Apache-2.0

package passthrough

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/contract"
	"github.com/pdkit/pdkit/internal/intake"
	"github.com/pdkit/pdkit/internal/jsonedit"
	"github.com/pdkit/pdkit/internal/modelname"
	"github.com/pdkit/pdkit/pdflow"
)

// body is a client's body, looked through for what no client may set.
type body struct {
	req    *connector.ClientRequest   // its members; of a form the model alone
	raw    []byte                     // a form, which passes as it came
	fields []*connector.ClientRequest // of the form, each as a member
	model  struct{ from, to int }     // where in the form the model's name is
}

// request returns the members, nil without a body.
func (b *body) request() *connector.ClientRequest {
	if b == nil {
		return nil
	}
	return b.req
}

// payload is a body as an engine gets it.
type payload struct {
	size int64
	open func() io.Reader
}

// read reads the body whole, nil if there is none. Only JSON passes, and forms where their fields can be read: what
// another form carries could not be looked through.
func (h *Handler) read(w http.ResponseWriter, r *http.Request, budget intake.Taker) (*body, *pdflow.Error) {
	raw, fault := intake.Read(w, r, h.o.MaxBody, max(h.o.Timeouts.Resolve(0).Body, 0), true, budget)
	if fault != nil || len(raw) == 0 {
		return nil, refusal(fault)
	}
	if boundary, form := h.boundaryOf(r); form {
		if boundary == "" {
			return nil, &pdflow.Error{Code: pdflow.CodeMediaType,
				Message: "Content-Type must have the form's boundary: multipart/form-data; boundary=…"}
		}
		if fault := intake.CheckEncoding(r.Header); fault != nil {
			return nil, refusal(fault)
		}
		return readForm(raw, boundary)
	}
	if fault := intake.CheckJSON(r.Header); fault != nil {
		return nil, refusal(fault)
	}
	req, err := connector.ParseRequest(connector.APIUnknown, raw)
	if err != nil {
		return nil, invalid(err)
	}
	return &body{req: req}, nil
}

// serve has the body name its model as engines do.
func (b *body) serve(model modelname.Served) *pdflow.Error {
	if b.raw != nil {
		from, to := b.model.from, b.model.to
		if string(b.raw[from:to]) != b.req.Model {
			return badForm("the form's model cannot be told from what stands around it", nil)
		}
		b.raw = slices.Concat(b.raw[:from], []byte(model.Name), b.raw[to:])
	}
	b.req = contract.Served(b.req, model.Name, model.JSON)
	return nil
}

// payload is what the engine gets: the client's bytes, which are not copied, without transfer members. A form that has
// one is refused.
func (b *body) payload(members []string) (*payload, *pdflow.Error) {
	if b == nil {
		return &payload{}, nil
	}
	for _, field := range b.fields {
		clean, err := contract.Without(field, members)
		if err != nil {
			return nil, invalid(err)
		}
		if strip := contract.Request(clean).Strip; len(strip) > 0 {
			return nil, &pdflow.Error{Code: pdflow.CodeInvalid, Param: strip[0].Name,
				Message: "a form must not have this field"}
		}
	}
	if b.raw != nil {
		return &payload{int64(len(b.raw)), func() io.Reader { return bytes.NewReader(b.raw) }}, nil
	}
	segments := new(jsonedit.Segments)
	req, err := contract.Without(b.req, members)
	if err == nil {
		err = contract.Leg(contract.NewLeg(req)).Splice(segments)
	}
	if err != nil {
		return nil, invalid(err)
	}
	return &payload{segments.Len(), func() io.Reader { return segments.NewReader() }}, nil
}

// Limits of a form, which has a file and a dozen fields.
const (
	maxParts = 64
	maxField = 1 << 20 // bytes of the value of a field, a prompt among them
	maxName  = 128     // bytes of its name
)

// boundaryOf returns what parts a form. It reports false where the body is none or the path takes none. Of the listed
// paths those of audio take one: a file and fields (OpenAI's API; /v1/audio/transcriptions of vLLM 0.32.0 and SGLang
// 0.5.23).
func (h *Handler) boundaryOf(r *http.Request) (boundary string, form bool) {
	types := r.Header["Content-Type"]
	if len(types) != 1 || !match("/v1/audio/*", r.URL.Path) && !h.added(r) {
		return "", false
	}
	media, params, err := mime.ParseMediaType(types[0])
	return params["boundary"], err == nil && media == "multipart/form-data"
}

// readForm reads the fields of a form, and not its files.
func readForm(raw []byte, boundary string) (*body, *pdflow.Error) {
	b := &body{raw: raw}
	model := []byte("{}")
	for parts := multipart.NewReader(bytes.NewReader(raw), boundary); ; {
		part, err := parts.NextRawPart()
		if errors.Is(err, io.EOF) && len(b.fields) > 0 {
			break
		}
		name := ""
		if err == nil {
			name = part.FormName()
		}
		switch {
		case err != nil:
			return nil, badForm("the body is not a whole form", err)
		case len(b.fields) == maxParts:
			return nil, badForm("the form has too many fields", nil)
		case name == "" || len(name) > maxName || !plain(name, "[]") || len(part.Header["Content-Disposition"]) != 1:
			return nil, badForm("the form has a field without a plain name", nil)
		}
		var value []byte
		if part.FileName() == "" {
			if value, err = io.ReadAll(io.LimitReader(part, maxField+1)); err != nil || len(value) > maxField {
				return nil, badForm("a field of the form is too long, or has no end", err)
			}
		}
		if name == "model" {
			if len(model) > len("{}") {
				return nil, &pdflow.Error{Code: pdflow.CodeInvalid, Param: name, Message: "stands twice in the form"}
			}
			model, _ = json.Marshal(map[string]string{name: string(value)}) // strings only
			b.model.from, b.model.to = partAt(raw, boundary, len(b.fields))
		}
		field, err := connector.ParseRequest(connector.APIUnknown, member(name, value))
		if err != nil {
			return nil, invalid(err)
		}
		b.fields = append(b.fields, field)
	}
	var err error
	if b.req, err = connector.ParseRequest(connector.APIUnknown, model); err != nil {
		return nil, invalid(err)
	}
	return b, nil
}

// partAt returns where in a form the content of a part is, 0 and 0 where this form is written too oddly to say so.
func partAt(raw []byte, boundary string, part int) (from, to int) {
	delimiter := []byte("--" + boundary)
	at := 0
	for n := 0; ; n++ {
		i := bytes.Index(raw[at:], delimiter)
		if i < 0 {
			return 0, 0
		}
		if at += i + len(delimiter); n < part {
			continue
		}
		head := bytes.Index(raw[at:], []byte("\r\n\r\n"))
		if head < 0 {
			return 0, 0
		}
		from = at + head + len("\r\n\r\n")
		size := bytes.Index(raw[from:], append([]byte("\r\n"), delimiter...))
		if size < 0 {
			return 0, 0
		}
		return from, from + size
	}
}

// member is a field as an object: a[b] is b inside a. Of its value only an object matters here, which may hold others.
func member(name string, value []byte) []byte {
	object := json.RawMessage("null")
	if value = bytes.TrimSpace(value); bytes.HasPrefix(value, []byte("{")) && json.Valid(value) {
		object = value
	}
	elements := strings.FieldsFunc(name, func(r rune) bool { return r == '[' || r == ']' || r == '.' })
	for _, element := range slices.Backward(elements) {
		object, _ = json.Marshal(map[string]json.RawMessage{element: object}) // valid JSON only
	}
	return object
}

func badForm(message string, err error) *pdflow.Error {
	return &pdflow.Error{Code: pdflow.CodeInvalid, Message: message, Err: err}
}

// refusal makes a fault an error, nil if there is none.
func refusal(fault *intake.Fault) *pdflow.Error {
	if fault == nil {
		return nil
	}
	e := &pdflow.Error{Code: pdflow.Code(fault.Code), Phase: "body", Message: fault.Message, Err: fault.Err}
	if e.Code == pdflow.CodeOverloaded {
		e.RetryAfter = time.Second
	}
	return e
}

func invalid(err error) *pdflow.Error {
	e := &pdflow.Error{Code: pdflow.CodeInvalid, Message: err.Error(), Err: err}
	if of, ok := errors.AsType[*connector.RequestError](err); ok {
		e.Param, e.Message = of.Param, of.Message
	}
	return e
}
