// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"strconv"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/handoff"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// TPUName is the name that tpu-inference's connector is registered under.
const TPUName = "tpu"

// DefaultTPULease is how long P keeps unread KV (tpu-inference's TPU_P2P_WAIT_PULL_TIMEOUT).
const DefaultTPULease = 180 * time.Second

func init() {
	connector.Register(TPUName, func(raw json.RawMessage) (connector.KVConnector, error) {
		var o TPUOptions
		if err := config.Decode(raw, &o); err != nil {
			return nil, err
		}
		return NewTPU(&o)
	}, "TPUConnector")
}

// TPUOptions are the settings of the connector "tpu".
type TPUOptions struct {
	// P's TPU_P2P_WAIT_PULL_TIMEOUT; default 180s, whole seconds
	LeaseDuration *config.Duration `json:"leaseDuration"`
	TransferPort  int              `json:"transferPort"` // TPU_KV_TRANSFER_PORT of the launch settings; default 9100
	NoticePort    int              `json:"noticePort"`   // TPU_SIDE_CHANNEL_PORT, the same on all engines; default 9600
}

// NewTPU makes the connector "tpu": TPUConnector of tpu-inference, in which D pulls P's KV between TPU hosts. nil means
// defaults.
//
// P names its KV only if it ended by length, and rounds down to whole blocks: of a prompt shorter than one block it
// transfers nothing and answers with an empty object, which D gets and computes the prompt. P needs no parameters.
//
// Facts: tpu-inference 0.32.0, tpu_inference/distributed/tpu_connector.py (TPUConnectorScheduler.request_finished,
// update_state_after_alloc; TPUConnectorWorker._pull_kv, _maybe_build_notif_socket) and utils.py. Read, not run.
func NewTPU(o *TPUOptions) (*Connector, error) {
	if o == nil {
		o = &TPUOptions{}
	}
	c := &Connector{name: TPUName, member: []string{connector.ParamsMember}, check: checkTPU, empty: true, length: true,
		lease: DefaultTPULease, usage: connector.Serving{ReusedInUsage: true}, rules: blockRule}
	var errs []error
	if d := o.LeaseDuration; d != nil {
		if c.lease = time.Duration(*d); c.lease < time.Second || c.lease%time.Second != 0 {
			errs = append(errs, &config.FieldError{Path: "leaseDuration",
				Problem: "is not a whole number of seconds above 0", Remedy: "the engines' TPU_P2P_WAIT_PULL_TIMEOUT"})
		}
	}
	for path, n := range map[string]int{"transferPort": o.TransferPort, "noticePort": o.NoticePort} {
		if n < 0 || n > math.MaxUint16 {
			errs = append(errs, &config.FieldError{Path: path, Problem: "is not a port", Remedy: "1 to 65535"})
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return c, nil
}

// checkTPU refuses an object of which D's engine would die: it indexes all four keys without asking whether they are
// there. With several hosts per engine, remote_host and remote_port are lists of one length, one item for each host. A
// port is text, since the engine reads it from its environment.
func checkTPU(raw json.RawMessage) error {
	const blocks = "remote_block_ids"
	o := handoff.Read(raw, blocks)
	o.Int("uuid", 0, math.MaxInt64)
	hosts, manyHosts := list(o, "remote_host")
	ports, manyPorts := list(o, "remote_port")
	if manyHosts != manyPorts || len(hosts) != len(ports) {
		o.Fault("remote_port", "does not have one port for each host")
	}
	for _, h := range hosts {
		if jsonedit.Kind(h) != jsonedit.String || len(h) <= len(`""`) {
			o.Fault("remote_host", "is not a string with text")
		}
	}
	for _, p := range ports {
		n, err := strconv.ParseUint(string(bytes.Trim(p, `"`)), 10, 16)
		if err != nil || n == 0 {
			o.Fault("remote_port", "is not a port number")
		}
	}
	depth := 1
	if ids, _ := o.Get(blocks); len(ids) > 0 && bytes.HasPrefix(bytes.TrimSpace(ids[1:]), []byte("[")) {
		depth = 2 // one list for each group of layers
	}
	o.SomeBlocks(blocks, depth)
	return o.Close()
}

// list returns a value, or the values of a list.
func list(o *handoff.Object, key string) (values []json.RawMessage, many bool) {
	raw, ok := o.Get(key)
	switch {
	case !ok:
		o.Fault(key, "is missing")
	case jsonedit.Kind(raw) != jsonedit.Array:
		values = []json.RawMessage{raw}
	default:
		if many = true; json.Unmarshal(raw, &values) != nil || len(values) == 0 {
			o.Fault(key, "is an empty list")
		}
	}
	return values, many
}
