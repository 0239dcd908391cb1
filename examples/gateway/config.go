// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"time"

	"k8s.io/client-go/rest"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow/modelserver"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// config is a whole configuration: at most one Gateway and any number of ModelServers.
type config struct {
	file    string
	gateway gatewaySpec
	models  []*modelServer
	notes   []note
	canary  time.Duration // period of checks that KV is reused; 0: none
	probe   time.Duration // period at which engines are asked for what their list lacks; 0: never
	pick    pick.Policy   // the zero policy takes engines in turn
	netHTTP bool          // net/http's client speaks to the engines
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
)

// gatewayObject is a whole document of kind Gateway.
type gatewayObject struct {
	APIVersion string          `json:"apiVersion"`
	Kind       string          `json:"kind"`
	Metadata   json.RawMessage `json:"metadata"` // free in form
	Status     json.RawMessage `json:"status"`
	Spec       gatewaySpec     `json:"spec"`
}

// gatewaySpec is the program's own part: kind Gateway.
type gatewaySpec struct {
	Listen       string             `json:"listen"`
	Admin        string             `json:"admin"` // "" turns it off
	MaxBodyBytes int64              `json:"maxBodyBytes"`
	DrainTimeout connector.Duration `json:"drainTimeout"`
	Passthrough  string             `json:"passthrough"` // "" or decode

	// ModelServers has the ModelServer objects of a cluster served, besides those of the file.
	ModelServers *clusterSpec `json:"modelServers"`
}

// clusterSpec is where ModelServer objects are watched.
type clusterSpec struct {
	Kubeconfig string `json:"kubeconfig"` // "": the cluster that the gateway itself runs in
	Namespace  string `json:"namespace"`  // "" is default
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
	*modelserver.ModelServer
	doc       *document
	discovery discoverySpec
	endpoints []discovery.Endpoint // static ones
	owner     *rest.Config         // of the cluster whose object it is; nil if it stands in the file
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
