import { spawnSync } from 'node:child_process'
import { existsSync, mkdirSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'

const NGINX = process.env['NGINX'] ?? 'nginx'
const LUA_LIBRARY = '/usr/share/lua/5.1'

export interface NginxFound {
  readonly modules: string
}

/** Where nginx has its modules, or why the candidate is left out. */
export function findNginx(): NginxFound | string {
  const { status, stderr } = spawnSync(NGINX, ['-V'], { encoding: 'utf8' })
  if (status !== 0) return 'nginx is not there: install nginx (or set NGINX to the binary)'
  return { modules: /--modules-path=(\S+)/.exec(stderr)?.[1] ?? '/usr/lib/nginx/modules' }
}

/** The same with Lua, and its Redis client and JSON modules. */
export function findNginxLua(): NginxFound | string {
  const found = findNginx()
  if (typeof found === 'string') return `${found}, with libnginx-mod-http-lua lua-nginx-redis lua-cjson`
  const parts: readonly (readonly [string, boolean])[] = [
    ['libnginx-mod-http-lua', existsSync(join(found.modules, 'ngx_http_lua_module.so'))],
    ['lua-nginx-redis', existsSync(join(LUA_LIBRARY, 'nginx/redis.lua'))],
    ['lua-cjson', existsSync(join(LUA_LIBRARY, 'cjson/util.lua'))],
  ]
  const lacking = parts.filter(([, there]) => !there).map(([name]) => name)
  return lacking.length === 0 ? found : `nginx has no Lua here: install ${lacking.join(' ')}`
}

export interface NginxOptions {
  /** A folder of its own. */
  readonly folder: string
  readonly port: number
  readonly upstreamPort: number
  /** With Lua and Redis; null: a plain reverse proxy. */
  readonly redisPort: number | null
  readonly modules: string
}

/** Writes the configuration; gives the command that serves it. One worker, as the candidate has one core. */
export function nginxCommand({ folder, port, upstreamPort, redisPort, modules }: NginxOptions): string[] {
  mkdirSync(folder, { recursive: true })
  const file = join(folder, 'nginx.conf')
  const lua = fileURLToPath(new URL('nginx/idempotency.lua', import.meta.url))
  const proxied = 'proxy_http_version 1.1; proxy_set_header Connection ""; proxy_set_header Host $http_host;'
  const guarded =
    redisPort === null
      ? ''
      : `location /v1/ { set $redis_port ${redisPort}; content_by_lua_file ${lua}; }
         location /upstream/ {
           internal; rewrite ^/upstream(.*)$ $1 break; ${proxied} proxy_pass http://upstream;
         }`
  writeFileSync(
    file,
    `${redisPort === null ? '' : `load_module ${modules}/ndk_http_module.so; load_module ${modules}/ngx_http_lua_module.so;`}
     daemon off; pid ${folder}/pid; error_log stderr warn; worker_processes 1;
     ${process.getuid?.() === 0 ? 'user root;' : ''}
     events { worker_connections 4096; }
     http {
       access_log /dev/null; keepalive_requests 100000000;
       client_body_buffer_size 256k; client_max_body_size 1m;
       ${['client_body', 'proxy', 'fastcgi', 'uwsgi', 'scgi'].map((what) => `${what}_temp_path ${folder}/${what};`).join(' ')}
       upstream upstream { server 127.0.0.1:${upstreamPort}; keepalive 128; keepalive_requests 100000000; }
       server {
         listen 127.0.0.1:${port};
         location / { ${proxied} proxy_pass http://upstream; }
         ${guarded}
       }
     }\n`,
  )
  return [NGINX, '-p', folder, '-e', 'stderr', '-c', file]
}
