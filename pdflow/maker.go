// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"errors"
	"net/http"
	"syscall"
	"time"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/internal/jsonedit"
	"github.com/pdkit/pdkit/pdflow/responses"
)

// WithResponses gives a request of the Responses API that refers to a response to the decode engine that made it, which
// alone has it. That engine serves it alone: P cannot see what the request refers to. Retries go to the same engine. If
// no engine has the response the error is of [CodeNoResponse]; if its engine is not ready, of [CodeNoEndpoint]. The
// flow tells x which engine made which response. Requests with the same conversation go to one engine, too, as long as
// it is ready. A response that a host passes on by itself ([Step.Relay]) is not seen, and is found by asking.
//
// Default: any decode engine gets such a request.
func WithResponses(x *responses.Index) Option {
	return optionFunc(func(o *options) error {
		o.responses = x
		return needs("WithResponses", x != nil, "an index")
	})
}

// atMaker serves a request of the Responses API: at the engine that made what it refers to, if it refers to anything.
// A response that this engine has no more is looked for once more.
func (x *serving) atMaker(member string) (*Body, *Error) {
	if x.given != nil || x.decode != "" { // the caller knows better
		return x.serve(member)
	}
	id := x.text("previous_response_id")
	if id == "" {
		return x.inConversation(member)
	}
	for again := false; ; again = true {
		e := x.findMaker(id)
		if e != nil {
			return nil, e
		}
		body, e := x.serve(member)
		switch {
		case e == nil || !e.lost():
			return body, e
		case again:
			return nil, noResponse()
		}
		x.f.opts.responses.Forget(id, x.decode)
		x.giveRetryBack()
		x.tries = tries{}
	}
}

func (x *serving) findMaker(id string) (e *Error) {
	var err error
	x.decode, err = x.f.opts.responses.Find(x.life.Context, id, func() http.Header {
		return (&Request{Header: x.header, RequestID: x.id}).EngineHeader(x.f.opts.forward...)
	})
	switch {
	case err == nil:
		return nil
	case x.life.Context.Err() != nil:
		return x.f.whyEnded(x.life.Context, "", "pick")
	case errors.Is(err, responses.ErrNotFound):
		return noResponse()
	}
	return &Error{Code: CodeNoEndpoint, Phase: "pick", Connector: x.f.name, RetryAfter: time.Second, Err: err,
		Message: "it is not known now which engine has the response"}
}

// noResponse is the error of a request that refers to a response which no engine has.
func noResponse() *Error {
	return &Error{Code: CodeNoResponse, Param: "previous_response_id",
		Message: "no engine has this response: it was not stored, or it was lost with its engine"}
}

// lost reports whether the engine of a response has told that it has it no more. A process that has ended refuses
// connections, and its responses were in its memory. A 404 of another scope speaks of the model or of the path.
func (e *Error) lost() bool {
	switch {
	case e.Code == CodeNotFound && e.Param == string(LegDecode): // the engine has left
		return true
	case e.Leg != LegDecode:
		return false
	case e.Status == http.StatusNotFound:
		return !e.scope.OfEngine()
	}
	return errors.Is(e.Err, syscall.ECONNREFUSED)
}

// inConversation gives requests of one conversation to one engine. Engines of today do not read the member; one that
// does has the conversation in its own memory.
func (x *serving) inConversation(member string) (*Body, *Error) {
	id := x.text("conversation")
	if id == "" {
		raw, _ := x.req.Field("conversation")
		id = gjson.GetBytes(raw, "id").String()
	}
	if id == "" {
		return x.serve(member)
	}
	id = "conversation " + id // no response's id has a space
	if engine, ok := x.f.opts.responses.Known(id); ok {
		x.decode = engine
	}
	body, e := x.serve(member)
	switch {
	case e == nil && body.a != nil:
		x.f.opts.responses.Learn(id, body.a.s.Decode.ID, "")
	case e != nil && x.decode != "" && (e.lost() || e.nobody()):
		x.f.opts.responses.Forget(id, x.decode)
	}
	return body, e
}

// text returns a member that is a string, "" if it is not.
func (x *serving) text(member string) string {
	raw, _ := x.req.Field(member)
	s, _ := jsonedit.Unquote(raw)
	return s
}

// learnResponse tells the index who has made a response. One that the client does not want stored can be referred to
// by nobody.
func (a *attempt) learnResponse(b *Body) {
	if raw, ok := a.s.Request.Field("store"); ok && string(raw) == "false" {
		return
	}
	path := "id"
	if b.sse {
		path = "response.id"
	}
	model := ""
	if a.f.opts.models.Hides() {
		model = a.x.model()
	}
	a.f.opts.responses.Learn(gjson.GetBytes(b.s.First(), path).Str, a.s.Decode.ID, model)
}
