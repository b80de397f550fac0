#!/bin/bash
# What the official mysql and mariadb images understand: <PREFIX>_ROOT_PASSWORD, _ROOT_HOST,
# _DATABASE, _USER, _PASSWORD, where the prefix is MYSQL, or MARIADB too for MariaDB; a command that
# begins with a dash is options of the server.
set -euo pipefail
if command -v mariadbd >/dev/null; then server=mariadbd; else server=mysqld; fi
[ $# -gt 0 ] || set -- "$server"
case $1 in -*) set -- "$server" "$@" ;; esac
[ "$1" = "$server" ] || exec "$@"
data=/var/lib/mysql

if [ "$(id -u)" = 0 ]; then
    # mysql-files is where MySQL's packages let the server read and write files.
    mkdir -p "$data" /var/run/mysqld /var/lib/mysql-files
    chown -R mysql:mysql "$data" /var/run/mysqld /var/lib/mysql-files
    exec chroot --userspec=mysql:mysql --skip-chdir / "$0" "$@"
fi

# setting NAME DEFAULT
setting() {
    local mysql=MYSQL_$1 mariadb=MARIADB_$1
    printf '%s' "${!mysql:-${!mariadb:-$2}}"
}

quoted() { printf "'%s'" "${1//\'/\'\'}"; }

# One statement a line: that is what --init-file and --bootstrap read.
accounts() {
    local host user database
    host=$(setting ROOT_HOST %)
    user=$(setting USER "")
    database=$(setting DATABASE "")
    echo "DROP USER IF EXISTS 'root'@'localhost';"
    echo "CREATE USER 'root'@'localhost' IDENTIFIED BY $(quoted "$password");"
    echo "CREATE USER 'root'@$(quoted "$host") IDENTIFIED BY $(quoted "$password");"
    echo "GRANT ALL PRIVILEGES ON *.* TO 'root'@'localhost' WITH GRANT OPTION;"
    echo "GRANT ALL PRIVILEGES ON *.* TO 'root'@$(quoted "$host") WITH GRANT OPTION;"
    [ -z "$database" ] || echo "CREATE DATABASE \`$database\`;"
    [ -z "$user" ] ||
        echo "CREATE USER $(quoted "$user")@'%' IDENTIFIED BY $(quoted "$(setting PASSWORD "")");"
    [ -z "$user" ] || [ -z "$database" ] ||
        echo "GRANT ALL PRIVILEGES ON \`${database//_/\\_}\`.* TO $(quoted "$user")@'%';"
}

# Called mysql_... before MariaDB 11.
mariadb_script() {
    local path
    for path in /usr/share/{mariadb,mysql}/{mariadb,mysql}_"$1".sql; do
        [ ! -e "$path" ] || { cat "$path"; return; }
    done
    echo "no script $1 of MariaDB" >&2
    return 1
}

mariadb_system() {
    echo "CREATE DATABASE mysql;"
    echo "USE mysql;"
    echo "SET @auth_root_socket=NULL;"
    mariadb_script system_tables
    mariadb_script performance_tables
    mariadb_script system_tables_data
    mariadb_script sys_schema
    echo "DELETE FROM mysql.global_priv WHERE User IN ('root', '');"
    echo "FLUSH PRIVILEGES;"
    accounts
}

if [ ! -d "$data/mysql" ]; then
    password=$(setting ROOT_PASSWORD "")
    if [ -z "$password" ]; then
        echo "MYSQL_ROOT_PASSWORD must be set to create a database" >&2
        exit 1
    fi
    if [ "$server" = mariadbd ]; then
        mariadb_system >/tmp/system.sql
        "$@" --bootstrap </tmp/system.sql
        rm /tmp/system.sql
    else
        (umask 077 && accounts >/tmp/accounts.sql)
        "$@" --initialize-insecure --init-file=/tmp/accounts.sql
        rm /tmp/accounts.sql
    fi
fi
exec "$@"
