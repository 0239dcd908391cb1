// SPDX-License-Identifier: Apache-2.0

package modelserver

import (
	"encoding/json"

	"github.com/pdkit/pdkit/config"
)

// Kind is the objects' kind.
const Kind = "ModelServer"

// APIVersions are those that are read. The spec is the same.
func APIVersions() []string {
	return []string{"networking.matrixinfer.ai/v1alpha1", "networking.serving.volcano.sh/v1alpha1"}
}

// object is a whole object. Metadata and status are Kubernetes' own and free in form.
type object struct {
	APIVersion json.RawMessage `json:"apiVersion"`
	Kind       json.RawMessage `json:"kind"`
	Metadata   json.RawMessage `json:"metadata"`
	Status     json.RawMessage `json:"status"`
	Spec       Spec            `json:"spec"`
}

// Spec is a ModelServer's spec.
type Spec struct {
	// the model that requests name; "" and "*" serve all names
	Model    string   `json:"model"`
	Adapters Adapters `json:"adapters"` // which LoRA adapters are the model's
	// clients' names of the model and of its adapters, each with that by which engines serve it; "*" is all others
	ModelNames       map[string]string `json:"modelNames"`
	InferenceEngine  string            `json:"inferenceEngine"` // vLLM, SGLang …; without effect
	WorkloadSelector WorkloadSelector  `json:"workloadSelector"`
	WorkloadPort     WorkloadPort      `json:"workloadPort"`
	TrafficPolicy    json.RawMessage   `json:"trafficPolicy"` // without effect: kvConnector has retries and timeouts
	KVConnector      config.Spec       `json:"kvConnector"`
	Attestation      Attestation       `json:"attestation"`
	KVEvents         KVEvents          `json:"kvEvents"`
	Encoder          Encoder           `json:"encoder"`
	Rollout          Rollout           `json:"rollout"`
	Rescue           Rescue            `json:"rescue"`
	KeepAlive        KeepAlive         `json:"keepAlive"`
	Usage            Usage             `json:"usage"` // whose count of cached tokens clients get: corrected or engine
	Admission        Admission         `json:"admission"`
	Decision         Decision          `json:"decision"`
	Discovery        Discovery         `json:"discovery"`
	TLS              TLS               `json:"tls"`
}

// TLS is for engines with https URLs: PEM files, which are read again when they change. A relative path starts at the
// working directory; a program that reads a file of objects may let it start at that file's folder, as cmd/gateway
// does.
type TLS struct {
	CAFile     string `json:"caFile"`     // the authorities that sign the engines' certificates
	CertFile   string `json:"certFile"`   // the certificate for engines that ask for one
	KeyFile    string `json:"keyFile"`    // the key of certFile
	ServerName string `json:"serverName"` // the name in the engines' certificates
}

// WorkloadSelector says which pods are the model's engines, and what each is for.
type WorkloadSelector struct {
	MatchLabels map[string]string `json:"matchLabels"` // of all the model's pods
	PDGroup     *PDGroup          `json:"pdGroup"`
}

// PDGroup tells prefill from decode pods. P and D are paired inside one value of the label GroupKey.
type PDGroup struct {
	GroupKey      string            `json:"groupKey"`      // P and D are paired inside one value of this label
	PrefillLabels map[string]string `json:"prefillLabels"` // of prefill pods
	DecodeLabels  map[string]string `json:"decodeLabels"`  // of decode pods
	EncodeLabels  map[string]string `json:"encodeLabels"`  // of encode pods, for an encode stage
}

// WorkloadPort is where the engines listen.
type WorkloadPort struct {
	Port     int    `json:"port"`     // the engines' port; 0 is 8000
	Protocol string `json:"protocol"` // without effect
}

// Encoder is an encode stage before the legs; no Type is none.
type Encoder struct {
	Type   string          `json:"type"`   // example or nixl
	Config json.RawMessage `json:"config"` // the stage's own settings: epd.Options
}

// Rollout gives a share of the requests to another connector.
type Rollout struct {
	Weight      *int        `json:"weight"`      // percent of the requests, by their ids
	KVConnector config.Spec `json:"kvConnector"` // the connector of this share, shaped as spec.kvConnector
}
