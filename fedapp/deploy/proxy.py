"""What stands in front of the SuperLink, as texts: an nginx site, and a Caddyfile.

Flower's control port has no login, and whoever reaches it runs code on every machine. So the SuperLink listens on
loopback, and the proxy passes devices to ``/v1/fleet``, but to ``/v1/control`` only operators, each as far as the
operator's role allows. What is refused there has an answer that Flower's command line prints.

Both look at the path as it was sent. A path may be spelled in many ways (``%2e``, ``//``, ``..``), of which proxy and
SuperLink might read one differently; Flower spells each in one.
"""

import json
from collections.abc import Iterable

from fedapp.deploy.keys import OPERATOR
from fedapp.deploy.operators.records import (
    FIRST,
    LOOK,
    LOOK_METHODS,
    MANAGE,
    ROLES,
    START,
    START_METHODS,
    Operators,
)
from fedapp.deploy.plan import LOOPBACK, Deployment

# The largest request that Flower sends: an app's bundle has 10 MiB at most, a piece of an array 5 MiB.
BODY_MIB = 16
# What one address may ask for. A message to a device takes 30 requests and one for each array, there and back, in
# a few seconds, and behind one address there may be many devices. What is too much gets 503, and Flower asks again.
REQUESTS_PER_SECOND = 200
REQUESTS_AT_ONCE = 128
# Debian's log of nginx, which logrotate keeps for two weeks; in nginx's container it is the standard output.
NGINX_LOG = "/var/log/nginx/access.log"
CONTROL = "/v1/control/"
# Response header in which the SuperLink names the run or node of a request, for the proxy's log.
ABOUT = "Fedapp-About"
_METHOD = f"^{CONTROL}[a-z-]+$"
_UNKNOWN = "permission denied: the certificate isn't that of an operator of this deployment, or was revoked"
_DENIED = "permission denied: operator {name} has the role {role}, which doesn't allow {method}"

_NGINX = """\
# nginx in front of the SuperLink, at /etc/nginx/conf.d/fedapp.conf of the server.
upstream fedapp_superlink {{
    server {superlink};
    keepalive 32;
    keepalive_timeout 4s;  # the SuperLink closes after 5
}}

# A path in Flower's own spelling alone, and no query: there is nothing to decode, and so not differently.
map $request_uri $fedapp_api {{
    default                     "";
    "~^/v1/fleet/[a-z-]+$"    fleet;
    "~{method}"  control;
}}

# The operators, each by the serial numbers of certificates that the authority has signed; any other is refused.
map $ssl_client_serial $fedapp_named {{
    default  "";
{serials}}}
map "$ssl_client_verify:$ssl_client_s_dn" $fedapp_operator {{
    default      "";
{first}    "~^SUCCESS:"  $fedapp_named;
}}
map $fedapp_operator $fedapp_role {{
    default  "";
{roles}}}
# What each role may ask for.
map "$fedapp_role:$request_uri" $fedapp_allowed {{
    default  "";
    "~^({look_roles}):{control}({look})$"  yes;
    "~^({start_roles}):{control}({start})$"  yes;
    "~^{manage}:{control}[a-z-]+$"  yes;
}}
# Who asked for what, a line of JSON a request: 'fedapp deploy audit --access-log' reads it.
log_format fedapp_control escape=json
    '{{"fedapp":"control","at":"$time_iso8601","id":"$request_id","operator":"$fedapp_operator",'
    '"role":"$fedapp_role","serial":"$ssl_client_serial","uri":"$request_uri","status":"$status",'
    '"about":"$upstream_http_{about}","address":"$remote_addr"}}';

# What is too much gets 503, and Flower asks again.
limit_req_zone $binary_remote_addr zone=fedapp_requests:10m rate={rate}r/s;
limit_conn_zone $binary_remote_addr zone=fedapp_connections:10m;

server {{
{listen}
    server_name {names};
    server_tokens off;

    ssl_certificate         {own}/server.crt;
    ssl_certificate_key     {own}/server.key;
    ssl_protocols           TLSv1.2 TLSv1.3;
    ssl_session_tickets     off;
    ssl_client_certificate  {own}/ca.crt;
    ssl_verify_client       optional;  # a wrong one is refused at once, none has to do without /v1/control
    ssl_verify_depth        1;

    # Who is silent, or slow on purpose, goes.
    client_header_timeout  10s;
    client_body_timeout    20s;
    send_timeout           30s;
    keepalive_timeout      15s;

    client_max_body_size         {body}m;
    client_body_buffer_size      512k;
    large_client_header_buffers  4 8k;
    limit_req   zone=fedapp_requests burst={burst} delay={rate};
    limit_conn  fedapp_connections {at_once};

    # A request is passed on when all of it is here: a slow one keeps nginx waiting, not the SuperLink.
    proxy_request_buffering        on;
    proxy_http_version             1.1;
    proxy_set_header               Connection "";
    proxy_set_header               Host $http_host;
    proxy_set_header               X-Forwarded-For $remote_addr;
    proxy_set_header               X-Forwarded-Proto https;
    proxy_ssl_verify               on;
    proxy_ssl_trusted_certificate  {own}/ca.crt;
    proxy_ssl_name                 localhost;

    location / {{
        return 404;
    }}

    location /v1/fleet {{
        if ($fedapp_api != fleet) {{ return 404; }}
        limit_except POST {{ deny all; }}
        proxy_buffers 16 64k;
        proxy_pass https://fedapp_superlink;
    }}

    location /v1/control {{
        access_log {log} fedapp_control;
        default_type application/json;
        if ($ssl_client_verify != SUCCESS) {{ return 403; }}
        if ($fedapp_api != control) {{ return 404; }}
        if ($fedapp_operator = "") {{ return 403 '{unknown}'; }}
        if ($fedapp_allowed = "") {{ return 403 '{denied}'; }}
        limit_except POST {{ deny all; }}
        # A run's log comes as it is written, and may be silent for days.
        proxy_buffering off;
        proxy_read_timeout 30d;
        proxy_pass https://fedapp_superlink;
    }}
}}
"""

_CADDY = """\
# Caddy in front of the SuperLink, at /etc/caddy/Caddyfile of the server. nginx is the better one: Caddy as it is
# distributed can't limit the requests and connections of an address.
{{
	admin off # or every process of this machine could open the control port; so restart, don't reload
	auto_https off
	default_sni {first}
	servers {{
		strict_sni_host insecure_off # there is but one site
		protocols h1
		max_header_size 32KB
		timeouts {{
			read_header 10s
			read_body 5m
			idle 15s
		}}
	}}
}}

(superlink) {{
	transport http {{
		tls_trusted_ca_certs {{$CREDENTIALS_DIRECTORY}}/ca.crt
		tls_server_name localhost
		keepalive 4s # the SuperLink closes after 5
	}}
}}

:{port} {{
	bind {addresses}
	# systemd hands them over (docs/deploy.md): the folder that they are in is the SuperLink's alone.
	tls {{$CREDENTIALS_DIRECTORY}}/server.crt {{$CREDENTIALS_DIRECTORY}}/server.key {{
		client_auth {{
			mode verify_if_given
			trusted_ca_cert_file {{$CREDENTIALS_DIRECTORY}}/ca.crt
		}}
	}}

	# A path in Flower's own spelling alone, and no query: there is nothing to decode, and so not differently.
	@fleet {{
		method POST
		vars_regexp {{http.request.uri}} ^/v1/fleet/[a-z-]+$
	}}
	@control {{
		method POST
		vars_regexp {{http.request.uri}} {method}
	}}
{matchers}	@large header_regexp Content-Length ^(\\d{{9,}}|[2-9]\\d{{7}}|1[7-9]\\d{{6}})$

	# A line of JSON a request, which 'fedapp deploy audit --access-log' reads; none of those of devices.
	log
	skip_log @fleet
	request_body {{
		max_size {body}MiB
	}}
	route {{
		respond @large 413
		reverse_proxy @fleet https://{superlink} {{
			import superlink
		}}
		route @control {{
{routes}		}}
		respond 404
	}}
}}
"""


_CADDY_UNIT = """\
# At /etc/systemd/system/caddy.service.d/fedapp.conf of the server: systemd reads the key, which Caddy's user can't.
[Service]
LoadCredential=ca.crt:{own}/ca.crt
LoadCredential=server.crt:{own}/server.crt
LoadCredential=server.key:{own}/server.key
"""


def nginx_site(deployment: Deployment, operators: Operators) -> str:
    """Return what goes into nginx's ``http`` block."""
    addresses = _public(deployment)
    named = [each for each in operators.present if each.name != FIRST]
    return _NGINX.format(
        superlink=deployment.superlink_address,
        own=f"{deployment.home}/superlink",
        listen="\n".join(f"    listen {address}:{deployment.port} ssl;" for address in addresses),
        # The operator's commands name the end of their tunnel, which is on loopback.
        names=" ".join(dict.fromkeys([*map(_in_url, deployment.hosts), LOOPBACK])),
        rate=REQUESTS_PER_SECOND,
        burst=10 * REQUESTS_PER_SECOND,
        at_once=REQUESTS_AT_ONCE,
        body=BODY_MIB,
        control=CONTROL,
        method=_METHOD,
        serials=_entries((serial, each.name) for each in named for serial in each.serials),
        first=_entries([(f'"SUCCESS:CN={OPERATOR}"', FIRST)] if operators.has_first else []),
        roles=_entries((each.name, each.role) for each in operators.present),
        look_roles="|".join(_roles_from(LOOK)),
        look="|".join(LOOK_METHODS),
        start_roles="|".join(_roles_from(START)),
        start="|".join(START_METHODS),
        manage=MANAGE,
        log=NGINX_LOG,
        about=ABOUT.lower().replace("-", "_"),
        unknown=_in_quotes(_answer(_UNKNOWN)),
        denied=_in_quotes(
            _answer(_DENIED.format(name="$fedapp_operator", role="$fedapp_role", method="$request_uri"))
        ),
    )


def caddyfile(deployment: Deployment, operators: Operators) -> str:
    """Return a whole Caddyfile."""
    target = f"https://{deployment.superlink_address}"
    return _CADDY.format(
        superlink=deployment.superlink_address,
        first=deployment.hosts[0],
        port=deployment.port,
        addresses=" ".join(_public(deployment)),
        body=BODY_MIB,
        method=_METHOD,
        matchers=_caddy_matchers(operators),
        routes=_caddy_routes(operators, target),
    )


def caddy_unit(deployment: Deployment) -> str:
    """Return what is added to the distribution's unit of Caddy."""
    return _CADDY_UNIT.format(own=f"{deployment.home}/superlink")


def _public(deployment: Deployment) -> tuple[str, ...]:
    """Return the addresses to listen on: for a try on one machine, loopback alone."""
    return (LOOPBACK,) if deployment.hosts[0] == LOOPBACK else ("0.0.0.0", "[::]")


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _entries(pairs: Iterable[tuple[str, str]]) -> str:
    """Return the lines of one of nginx's maps."""
    return "".join(f"    {key}  {value};\n" for key, value in pairs)


def _roles_from(role: str) -> tuple[str, ...]:
    """Return the roles that may do all that a role may."""
    return ROLES[ROLES.index(role) :]


def _caddy_matchers(operators: Operators) -> str:
    """Return Caddy's matchers of each role: who has it, and what of it is allowed."""
    lines = (
        [f'@first vars {{http.request.tls.client.subject}} "CN={OPERATOR}"'] if operators.has_first else []
    )
    methods = {LOOK: LOOK_METHODS, START: LOOK_METHODS + START_METHODS}
    for role, serials in _caddy_serials(operators).items():
        who = f"vars {{http.request.tls.client.serial}} {' '.join(serials)}"
        lines.append(f"@{role} {who}")
        if role in methods:
            what = f"vars_regexp {{http.request.uri}} ^{CONTROL}({'|'.join(methods[role])})$"
            lines += [f"@{role}_allowed {{", f"\t{who}", f"\t{what}", "}"]
    return "".join(f"\t{line}\n" for line in lines)


def _caddy_routes(operators: Operators, target: str) -> str:
    """Return what becomes of each role's requests."""
    roles = _caddy_serials(operators)
    allowed = [f"{role}_allowed" if role != MANAGE else role for role in roles]
    lines = []
    for matcher in [*(["first"] if operators.has_first else []), *allowed]:
        lines += [f"reverse_proxy @{matcher} {target} {{", "\timport superlink", "\tflush_interval -1", "}"]
    lines.append("header Content-Type application/json")
    subject, uri = "{http.request.tls.client.subject}", "{http.request.uri}"
    for role in roles:
        if role != MANAGE:
            said = _answer(_DENIED.format(name=subject, role=role, method=uri))
            lines.append(f"respond @{role} `{said}` 403")
    lines.append(f"respond `{_answer(_UNKNOWN)}` 403")
    return "".join(f"\t\t\t{line}\n" for line in lines)


def _caddy_serials(operators: Operators) -> dict[str, list[str]]:
    """Return the serial numbers of the certificates of each role that somebody has, in decimal as Caddy has them."""
    found: dict[str, list[str]] = {}
    for each in operators.present:
        if each.serials:
            found.setdefault(each.role, []).extend(str(int(serial, 16)) for serial in each.serials)
    return found


def _answer(said: str) -> str:
    """Return a refusal as Flower's command line reads it."""
    return json.dumps({"detail": said})


def _in_quotes(text: str) -> str:
    """Return a text as it stands between nginx's single quotes."""
    return text.replace("\\", "\\\\").replace("'", "\\'")
