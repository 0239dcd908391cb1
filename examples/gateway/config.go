// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// config is a whole configuration: at most one Gateway and any number of ModelServers.
type config struct {
	file    string
	gateway gatewaySpec
	models  []*modelServer
	notes   []note
	canary  time.Duration // period of checks that KV is reused; 0: none
	pick    pick.Policy   // the zero policy takes engines in turn
}

// note is something to tell about a well-formed configuration.
type note struct {
	kind noteKind
	fault
}

type noteKind string

const (
	warning       noteKind = "warning"
	withoutEffect noteKind = "without effect"
	notThereYet   noteKind = "not there yet"
)

// notThere reports whether the configuration needs something that is not built yet.
func (c *config) notThere() bool {
	for _, n := range c.notes {
		if n.kind == notThereYet {
			return true
		}
	}
	return false
}

// object is what documents of every kind share. Metadata and status are Kubernetes' own and free in form.
type object[S any] struct {
	APIVersion string          `json:"apiVersion"`
	Kind       string          `json:"kind"`
	Metadata   json.RawMessage `json:"metadata"`
	Status     json.RawMessage `json:"status"`
	Spec       S               `json:"spec"`
}

// gatewaySpec is the program's own part: kind Gateway.
type gatewaySpec struct {
	Listen       string             `json:"listen"`
	Admin        string             `json:"admin"` // "" turns it off
	MaxBodyBytes int64              `json:"maxBodyBytes"`
	DrainTimeout connector.Duration `json:"drainTimeout"`
	Passthrough  string             `json:"passthrough"` // "" or decode
}

// defaultGateway is what holds where a Gateway, or a member of it, is left out.
func defaultGateway() gatewaySpec {
	return gatewaySpec{
		Listen:       "127.0.0.1:8000",
		Admin:        "127.0.0.1:9000",
		MaxBodyBytes: 32 << 20,
		DrainTimeout: connector.Duration(30 * time.Second),
	}
}

// modelServer is one model with its engines: kind ModelServer.
type modelServer struct {
	doc       *document
	name      string // NAMESPACE/NAME, "" without a name
	spec      modelServerSpec
	endpoints []discovery.Endpoint // static ones
	main      opened
	rollout   *opened
}

// opened is a connector that the configuration names. connector is nil where it is not built yet.
type opened struct {
	spec      connector.Spec
	name      string
	connector connector.KVConnector
	fallback  *opened
}

// modelServerSpec is the spec of a ModelServer object, as Kubernetes has it, with the members that only this gateway reads.
// Whether a part was given at all is asked of its document: a part with a fault inside was given too.
type modelServerSpec struct {
	Model            string           `json:"model"` // "" and "*" serve all names
	InferenceEngine  string           `json:"inferenceEngine"`
	WorkloadSelector workloadSelector `json:"workloadSelector"`
	WorkloadPort     workloadPort     `json:"workloadPort"`
	TrafficPolicy    json.RawMessage  `json:"trafficPolicy"`
	KVConnector      connector.Spec   `json:"kvConnector"`
	Encoder          encoderSpec      `json:"encoder"`
	Rollout          rolloutSpec      `json:"rollout"`
	Discovery        discoverySpec    `json:"discovery"`
}

type workloadSelector struct {
	MatchLabels map[string]string `json:"matchLabels"`
	PDGroup     pdGroup           `json:"pdGroup"`
}

type pdGroup struct {
	GroupKey      string            `json:"groupKey"`
	PrefillLabels map[string]string `json:"prefillLabels"`
	DecodeLabels  map[string]string `json:"decodeLabels"`
}

type workloadPort struct {
	Port     int    `json:"port"`
	Protocol string `json:"protocol"`
}

type encoderSpec struct {
	Type   string          `json:"type"`
	Config json.RawMessage `json:"config"`
}

type rolloutSpec struct {
	Weight      *int           `json:"weight"` // percent
	KVConnector connector.Spec `json:"kvConnector"`
}

// discoverySpec has exactly one member.
type discoverySpec struct {
	Static       staticSpec       `json:"static"`
	File         fileSpec         `json:"file"`
	DNS          dnsSpec          `json:"dns"`
	Kubernetes   kubernetesSpec   `json:"kubernetes"`
	Registration registrationSpec `json:"registration"`
}

type staticSpec struct {
	Endpoints []endpointSpec `json:"endpoints"`
}

type endpointSpec struct {
	URL        string            `json:"url"`
	Role       string            `json:"role"`
	Group      string            `json:"group"`
	Zone       string            `json:"zone"`
	Attributes map[string]string `json:"attributes"`
}

type fileSpec struct {
	Path string `json:"path"`
}

type dnsSpec struct {
	Prefill  string `json:"prefill"`
	Decode   string `json:"decode"`
	Encode   string `json:"encode"`
	Port     int    `json:"port"`
	Resolver string `json:"resolver"`
}

type kubernetesSpec struct {
	Kubeconfig string `json:"kubeconfig"`
	Namespace  string `json:"namespace"`
	Service    string `json:"service"`
	Port       int    `json:"port"`
}

type registrationSpec struct {
	Listen string `json:"listen"`
	HTTP   string `json:"http"`
}
