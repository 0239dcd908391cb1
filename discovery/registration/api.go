// SPDX-License-Identifier: Apache-2.0

package registration

import (
	"encoding/json"
	"errors"
	"io"
	"log"
	"math"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/pdkit/pdkit/discovery"
)

const endpointsPath = "/v1/endpoints"

// silent discards what net/http logs about clients' mistakes.
var silent = log.New(io.Discard, "", 0)

// api is the HTTP side of a source.
type api struct {
	registry *registry
	tokens   func() digests // nil: no token is required
	lease    time.Duration
}

func newHandler(r *registry, tokens func() digests, lease time.Duration) http.Handler {
	a := &api{registry: r, tokens: tokens, lease: lease}
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+endpointsPath, a.list)
	mux.HandleFunc("POST "+endpointsPath, a.register)
	mux.HandleFunc("DELETE "+endpointsPath+"/{id}", a.remove)
	mux.HandleFunc("PUT "+endpointsPath+"/{id}/heartbeat", a.heartbeat)
	mux.HandleFunc("POST "+endpointsPath+"/{id}/drain", a.drain)
	for path, allowed := range map[string]string{"": "GET, HEAD, POST", "/{id}": "DELETE", "/{id}/heartbeat": "PUT",
		"/{id}/drain": "POST"} {
		mux.HandleFunc(endpointsPath+path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Allow", allowed)
			fail(w, http.StatusMethodNotAllowed, "method_not_allowed", "", "this path takes "+allowed)
		})
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		fail(w, http.StatusNotFound, "not_found", "", "there is no such path")
	})
	sameSite := http.NewCrossOriginProtection()
	sameSite.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fail(w, http.StatusForbidden, "forbidden", "", "a browser's request from another site")
	}))
	return sameSite.Handler(a.guard(mux))
}

// guard requires a token.
func (a *api) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if a.tokens != nil && !a.tokens().allow(r.Header.Get("Authorization")) {
			w.Header().Set("WWW-Authenticate", "Bearer")
			fail(w, http.StatusUnauthorized, "unauthorized", "", "the bearer token is missing or wrong")
			return
		}
		next.ServeHTTP(w, r)
	})
}

// leased is the response to register and heartbeat.
type leased struct {
	ID           string `json:"id"`
	LeaseSeconds int    `json:"leaseSeconds"`
}

func (a *api) register(w http.ResponseWriter, r *http.Request) {
	raw, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if _, large := errors.AsType[*http.MaxBytesError](err); large {
		fail(w, http.StatusRequestEntityTooLarge, "body_too_large", "", "the body has more than "+strconv.Itoa(maxBody)+
			" bytes")
		return
	}
	if err != nil {
		fail(w, http.StatusBadRequest, "invalid_request", "", "the body cannot be read")
		return
	}
	e, lease, bad := readRegistration(raw, a.lease)
	if bad != nil {
		fail(w, http.StatusBadRequest, "invalid_request", bad.field, bad.Error())
		return
	}
	status := http.StatusOK
	switch a.registry.register(e, lease) {
	case conflict:
		fail(w, http.StatusConflict, "conflict", "url", "url: is registered under another id")
		return
	case full:
		fail(w, http.StatusServiceUnavailable, "too_many_endpoints", "", "as many endpoints are registered as may be")
		return
	case created:
		status = http.StatusCreated
		w.Header().Set("Location", endpointsPath+"/"+url.PathEscape(e.ID))
	case done, unknown:
	}
	writeJSON(w, status, leased{e.ID, seconds(lease)})
}

func (a *api) heartbeat(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	lease, v := a.registry.renew(id)
	if v == unknown {
		noEndpoint(w)
		return
	}
	writeJSON(w, http.StatusOK, leased{id, seconds(lease)})
}

func (a *api) drain(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	if a.registry.drain(id) == unknown {
		noEndpoint(w)
		return
	}
	writeJSON(w, http.StatusOK, map[string]any{"id": id, "phase": discovery.PhaseDraining})
}

func (a *api) remove(w http.ResponseWriter, r *http.Request) {
	switch a.registry.remove(r.PathValue("id")) {
	case unknown:
		noEndpoint(w)
	case conflict:
		fail(w, http.StatusConflict, "conflict", "", "this engine announces itself by ZeroMQ and would come back: "+
			"drain it, and stop it")
	default:
		w.WriteHeader(http.StatusNoContent)
	}
}

// item is an engine in the list.
type item struct {
	ID          string            `json:"id"`
	URL         string            `json:"url"`
	Role        discovery.Role    `json:"role"`
	Phase       discovery.Phase   `json:"phase"`
	Group       string            `json:"group,omitempty"`
	Zone        string            `json:"zone,omitempty"`
	Model       string            `json:"model,omitempty"`
	Version     string            `json:"version,omitempty"`
	Attributes  map[string]string `json:"attributes,omitempty"`
	AnnouncedBy string            `json:"announcedBy"` // zmq or http
	SecondsLeft int               `json:"secondsLeft"` // until it leaves if it is not heard again, rounded up
}

func (a *api) list(w http.ResponseWriter, _ *http.Request) {
	items := []item{}
	for _, l := range a.registry.list() {
		by := "http"
		if l.pinged {
			by = "zmq"
		}
		items = append(items, item{
			ID: l.ID, URL: l.URL.String(), Role: l.Role, Phase: l.Phase, Group: l.Group, Zone: l.Zone, Model: l.Model,
			Version:    l.Version,
			Attributes: l.Attributes, AnnouncedBy: by, SecondsLeft: seconds(l.left),
		})
	}
	writeJSON(w, http.StatusOK, map[string]any{"endpoints": items})
}

func seconds(d time.Duration) int { return int(math.Ceil(d.Seconds())) }

func noEndpoint(w http.ResponseWriter) {
	fail(w, http.StatusNotFound, "not_found", "", "no such endpoint is registered here: register it")
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	body, _ := json.Marshal(v) // cannot fail: strings and numbers only
	write(w, status, body)
}

// fail sends an error in the form of all of pdkit's errors.
func fail(w http.ResponseWriter, status int, code, param, message string) {
	kind := "invalid_request_error"
	if status >= http.StatusInternalServerError {
		kind = "server_error"
	}
	object := map[string]any{"message": message, "type": kind, "param": nil, "code": code}
	if param != "" {
		object["param"] = param
	}
	body, _ := json.Marshal(map[string]any{"error": object})
	write(w, status, body)
}

func write(w http.ResponseWriter, status int, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body)
}
