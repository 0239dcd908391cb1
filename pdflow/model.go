// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"bytes"
	"cmp"
	"fmt"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/contract"
	"github.com/pdkit/pdkit/internal/modelname"
)

// WithModel says by which name the flow's engines serve the models that clients name so: served is the model, or a LoRA
// adapter of it. Without names it goes for all others of at most 512 bytes, but for those of adapters ([WithAdapters]).
// It may be given for several served names.
//
// Legs, pickers, connectors and what observers see of a session have the served name. The client has its own: in the
// response and in each event of it (model, response.model of the Responses API, message.model of the Messages API), and
// in error texts of engines. So have spans, [Refusal] and [SessionInfo]. A request that names its model as engines do
// is not changed, and neither is its response. The response to one that names none has the name that comes first in the
// alphabet.
//
// A [Mux] gives the flow the requests for names, unless it has a route of its own for one. If several flows have a
// name, its requests go to the flow whose model comes first in the alphabet.
func WithModel(served string, names ...string) Option {
	return optionFunc(func(o *options) error {
		if o.models == nil {
			o.models = &modelname.Names{}
		}
		if len(names) == 0 {
			names = []string{modelname.Any}
		}
		for _, name := range names {
			if err := o.models.Add(name, served); err != nil {
				return fmt.Errorf("WithModel: %w", err)
			}
		}
		return nil
	})
}

// exchange has the request name its model as the flow's engines do. It is done once, before anything else is decided. A
// flow that others fall back to goes by what the client has named.
func (f *Flow) exchange(c *call) {
	if f.opts.models == nil {
		return
	}
	asked := c.model()
	served := f.opts.models.Of(asked, f.opts.adapters)
	switch {
	case asked == "" && f.opts.models.Hides():
		c.names = f.opts.models // the engines choose the model, and name it in the response
	case served.Name != "" && served.Name != c.req.Model:
		c.asked, c.names = asked, f.opts.models
		c.req = contract.Served(c.req, served.Name, served.JSON)
	}
}

// model is the one that the client has named.
func (c *call) model() string { return cmp.Or(c.asked, c.req.Model) }

// withAskedModel puts the name that the client has asked for into what next returns.
func (a *attempt) withAskedModel(next func([]byte) ([]byte, error)) func([]byte) ([]byte, error) {
	put := a.x.names.PutBack(a.x.asked)
	return func(data []byte) ([]byte, error) {
		if next != nil {
			var err error
			if data, err = next(data); err != nil || data == nil {
				return data, err
			}
		}
		return put(data), nil
	}
}

// askedModel is a response that a connector has made of P's, with the name that the client has asked for.
func (a *attempt) askedModel(r connector.Response) connector.Response {
	if a.x.names == nil {
		return r
	}
	put := a.x.names.PutBack(a.x.asked)
	r.Body = bytes.Clone(put(r.Body))
	events := r.Events
	r.Events = make([][]byte, len(events))
	for i, event := range events {
		r.Events[i] = bytes.Clone(put(event))
	}
	return r
}
