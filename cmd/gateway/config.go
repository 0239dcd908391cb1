// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"path/filepath"
	"runtime/debug"
	"time"

	"k8s.io/client-go/rest"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/config/yamlfile"
	"github.com/pdkit/pdkit/pdflow/modelserver"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// configuration is a whole configuration: at most one Gateway and any number of ModelServers.
type configuration struct {
	flagSettings
	file    string
	content []byte // of the file
	gateway gatewaySpec
	doc     *yamlfile.Document // of the Gateway; nil without one
	models  []*modelServer
	notes   []note
}

// flagSettings are those of the command line that no file has.
type flagSettings struct {
	syntheticProbe time.Duration      // period of checks that KV is reused; 0: none
	inspect        time.Duration      // period at which engines are asked for what their list lacks; 0: never
	pick           pick.Policy        // the zero policy takes engines in turn
	pickKV         bool               // in place of pick, the engines' events choose, where a model follows them
	netHTTP        bool               // net/http's client speaks to the engines
	pprof          bool               // the admin address serves Go's profiles
	recording      recording          // of decisions
	engineKey      func() http.Header // of what the gateway itself asks engines; nil: they want none
	genAI          string             // gen_ai.provider.name of metrics by those conventions; "": none
}

// note is a remark on a well-formed configuration.
type note struct {
	kind noteKind
	yamlfile.Fault
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

// gatewaySpec is the program's own part: kind Gateway. docs/configuration.md repeats the comments of the fields.
type gatewaySpec struct {
	Listen string `json:"listen"` // the address for clients, HOST:PORT
	Admin  string `json:"admin"`  // the address for operators, HOST:PORT; "" turns it off
	// a client's larger body gets 413, and nothing is sent to an engine
	MaxBodyBytes int64 `json:"maxBodyBytes"`
	// bytes of bodies and of prefill responses in flight, all together; a request for which nothing is left gets 503.
	// An eighth is kept for bodies of up to 64 KiB
	MaxBytesInFlight int64 `json:"maxBytesInFlight"`
	// how long running streams may go on after SIGTERM; 0 cuts them at once
	DrainTimeout config.Duration `json:"drainTimeout"`
	// decode sends other inference paths to a decode engine; "" answers 404
	Passthrough string `json:"passthrough"`
	// paths that passthrough lets pass besides those of its own list
	PassthroughPaths []string `json:"passthroughPaths"`
	// headers of clients that engines get besides the usual ones (pdflow.WithForwardHeaders)
	ForwardHeaders []string `json:"forwardHeaders"`

	TLS *serverTLS `json:"tls"`
	// a file with the bearer tokens, one a line, that engines must send to register by HTTP; "" asks for none
	RegistrationTokenFile string `json:"registrationTokenFile"`

	// ModelServers is where ModelServer objects are watched, which are served besides those of the file.
	ModelServers *clusterSpec `json:"modelServers"`
}

// serverTLS makes listen an HTTPS address. A relative path starts at the configuration's folder.
type serverTLS struct {
	CertFile string `json:"certFile"` // the gateway's certificate, PEM
	KeyFile  string `json:"keyFile"`  // the key of certFile
	// the authorities of which clients must show a certificate; "" asks for none
	ClientCAFile string `json:"clientCAFile"`
}

// clusterSpec is where ModelServer objects are watched.
type clusterSpec struct {
	Kubeconfig string `json:"kubeconfig"` // a file; "" is the cluster that the gateway itself runs in
	Namespace  string `json:"namespace"`  // whose objects are served
}

// defaultGateway returns the values that hold where a Gateway, or a member of it, is left out.
func defaultGateway() gatewaySpec {
	return gatewaySpec{
		Listen:       "127.0.0.1:8000",
		Admin:        "127.0.0.1:9000",
		MaxBodyBytes: 32 << 20,
		DrainTimeout: config.Duration(30 * time.Second),
	}
}

// bytesInFlight is MaxBytesInFlight, or its default: a quarter of the memory limit, or 1 GiB without one, and at least
// what one body needs beside the eighth that is kept for small ones.
func (g *gatewaySpec) bytesInFlight() int64 {
	if g.MaxBytesInFlight > 0 {
		return g.MaxBytesInFlight
	}
	most := int64(1 << 30)
	if limit := debug.SetMemoryLimit(-1); limit < math.MaxInt64 {
		most = limit / 4
	}
	return max(most, g.MaxBodyBytes+g.MaxBodyBytes/7+1)
}

// modelServer is one model with its engines: kind ModelServer.
type modelServer struct {
	*modelserver.ModelServer
	doc   *yamlfile.Document
	owner *rest.Config // of the cluster whose object it is; nil if it stands in the file
}

func (n note) log(log *slog.Logger) {
	log.Warn(string(n.kind), "where", fmt.Sprintf("%s:%d", n.File, n.Line), "field", n.Path, "what", n.Problem)
}

// beside returns the place of a file that the configuration names: a relative path starts at the configuration's
// folder.
func (c *configuration) beside(path string) string {
	if path == "" || filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(filepath.Dir(c.file), path)
}
